"""``megasched explain``: for each parameter, what decided how it lies, and what of it is communicated."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from megasched.layout import Layout
from megasched.lowering.plan import Plan
from megasched.megatron.session import Session, open_session
from megasched.placement import Placement
from megasched.report.fold import label_indices
from megasched.report.show import AUTO
from megasched.roles import Roles

NOBODY = "nothing asks for a cut"


@dataclass(frozen=True)
class Decision:
    """What is done with one parameter, or with the same one of several layers.

    Attributes:
        parameter: HF name; indices of layers that are decided alike are folded: ``model.layers.0-3.mlp...``.
        shape: in the HF checkpoint.
        local_shape: on one rank, padding included.
        placement: in words: cut along an axis, or whole.
        decided_by: the schedule's line, the adapter's glob, the entry of HF's plan, or what was inferred.
        gradient: how it comes about on a rank.
        declined: what was asked for, or looked for, and is not done, with the reason; or empty.
    """

    parameter: str
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    placement: str
    decided_by: str
    gradient: str
    declined: str = ""


@dataclass(frozen=True)
class Explanation:
    """All decisions for one model at one layout, in the order of the definition's parameters.

    Attributes:
        context: what context parallelism does, in words; empty without.
    """

    model: str
    layout: Layout
    decisions: list[Decision]
    context: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data for JSON."""
        decisions = [asdict(decision) for decision in self.decisions]
        return {"model": self.model, "layout": vars(self.layout), "decisions": decisions, "context": self.context}


def explain_schedule(
    schedule: str,
    hf_model: str,
    layout: Layout,
    *,
    overrides: Sequence[str] = (),
    trust_remote_code: bool = False,
    objective: str | None = None,
) -> Explanation:
    """Plans a schedule as a run would and tells of every parameter why it lies as it does.

    Raises:
        ConfigError, ScheduleError: whatever a run would refuse about model, schedule and layout.
    """
    session = open_session(
        schedule,
        hf_model,
        layout,
        overrides=overrides,
        trust_remote_code=trust_remote_code,
        objective=objective,
    )
    decisions = decisions_of(session, by_user=schedule != AUTO)
    return Explanation(type(session.definition).__name__, layout, decisions, context_lines(session.plan))


def decisions_of(session: Session, *, by_user: bool) -> list[Decision]:
    """A decision for every parameter, layers folded.

    Args:
        by_user: whether the schedule's lines are the user's, and so decide by themselves.
    """
    plan, roles = session.plan, session.schedule.roles
    lines = {record.path: record.source for record in plan.records_of("shard")} if by_user else {}
    made = []
    for name, canonical in plan.canonical.items():
        placement = plan.placements[canonical]
        module = name.rpartition(".")[0]
        tied = f"tied to {canonical}" if canonical != name else ""
        asked = f"schedule, {lines[module]}" if module in lines else roles.origin.get(module, "")
        decided = tied or (asked if placement.sharded or module in plan.cuts else "") or NOBODY
        # A bias that a row linear keeps whole was decided on with its weight; nothing of it is declined.
        declined = "" if module in plan.cuts or module in plan.experts else _declined(roles, module)
        made.append(
            Decision(
                name,
                placement.shape,
                plan.local_shape(placement),
                _words(placement),
                decided,
                _gradient(placement),
                declined,
            )
        )
    return fold_decisions(made)


def context_lines(plan: Plan) -> tuple[str, ...]:
    """What context parallelism does, layers folded."""
    if plan.sequence is None:
        return ()
    lines = [f"each CP rank runs the definition on 2 of {2 * plan.layout.cp} pieces of a sequence"]
    if plan.sequence.attention:
        lines.append(f"queries meet the keys of all CP ranks: {_fold_layers(plan, plan.sequence.attention)}")
    if plan.sequence.regions:
        lines.append(f"run on whole sequences by each CP rank: {_fold_layers(plan, plan.sequence.regions)}")
    return tuple(lines)


def _fold_layers(plan: Plan, paths: Iterable[str]) -> str:
    """Paths, as one where they differ in their layer alone."""
    structure = plan.structure
    assert structure is not None
    groups: dict[str, list[int]] = {}
    for path in sorted(paths):
        index = structure.index_of(path)
        inside = path if index is None else path.removeprefix(structure.layer_path(index))
        groups.setdefault(inside, []).extend([] if index is None else [index])
    folded = [(f"{structure.layers}.{label_indices(sorted(found))}" if found else "") + inside
              for inside, found in groups.items()]  # fmt: skip
    return ", ".join(folded)


def _declined(roles: Roles, module: str) -> str:
    """What was declined of a module, or of one around it."""
    while module:
        if module in roles.declined:
            return roles.declined[module]
        module = module.rpartition(".")[0]
    return ""


def _words(placement: Placement) -> str:
    if placement.axis is None:
        return "whole"
    if placement.group == "ep":
        return f"experts along axis {placement.axis} shared out over EP"
    words = f"cut along axis {placement.axis}"
    if placement.components:
        words += f", {' + '.join(map(str, placement.components))} each on its own"
    return words + (f", padded to {placement.padded}" if placement.padded else "")


def _gradient(placement: Placement) -> str:
    if placement.group == "ep":
        return "of its experts, by the tokens of all ranks"
    if placement.sharded:
        return "of its part"
    return "partial, summed over TP" if placement.tp_gradient == "partial" else "the same on every TP rank"


def fold_decisions(decisions: Iterable[Decision]) -> list[Decision]:
    """Parameters that differ in the index of their layer alone, and are decided alike, as one."""
    groups: dict[Any, list[int]] = {}
    for decision in decisions:
        index = re.search(r"\.(\d+)\.", decision.parameter)
        pattern = decision.parameter
        if index is not None:
            pattern = f"{pattern[: index.start()]}.*.{pattern[index.end() :]}"
        groups.setdefault(replace(decision, parameter=pattern), []).append(int(index[1]) if index else -1)
    return [
        replace(decision, parameter=decision.parameter.replace("*", label_indices(indices), 1))
        for decision, indices in groups.items()
    ]
