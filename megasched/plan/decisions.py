"""Tells for each parameter of a run what decided its placement, and how its gradient comes about on a rank."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from megasched.language.roles import Roles
from megasched.language.schedule import matches_glob
from megasched.plan.placement import Placement
from megasched.plan.plan import Plan

# More pieces of folded indices than this are abbreviated.
LABEL_PIECES = 4
NOBODY = "nothing asks for a cut"


@dataclass(frozen=True)
class Decision:
    """Describes what is done with one parameter, or with the same parameter of several layers.

    Attributes:
        parameter: HF name; indices of layers that are decided alike are folded: ``model.layers.0-3.mlp...``.
        shape: shape in the HF checkpoint.
        local_shape: shape on one rank, padding included.
        placement: in words: cut along an axis, or whole.
        decided_by: the schedule's line, the adapter's glob, the entry of HF's plan, the tie, or what was inferred.
        gradient: in words: of the rank's part, partial, or complete on every rank.
        gathered: why the output of its cut module is gathered, with the line of the definition; or empty.
        declined: a cut that was asked for, or looked for, and is not made, with the reason; or empty.
    """

    parameter: str
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    placement: str
    decided_by: str
    gradient: str
    gathered: str = ""
    declined: str = ""


def decisions_of(plan: Plan, *, by_user: bool, only: str = "**") -> list[Decision]:
    """Returns the decisions on the parameters of a plan, with layers that are decided alike folded.

    Args:
        by_user: whether the schedule is the user's, so that its lines decide by themselves.
        only: glob of the parameters to look at, as for a schedule's paths.
    """
    lines = {record.path: record.source for record in plan.records_of("shard")} if by_user else {}
    made = []
    for name, canonical in plan.canonical.items():
        if not matches_glob(only.split("."), name.split(".")):
            continue
        placement = plan.placements[canonical]
        module = name.rpartition(".")[0]
        tied = f"tied to {canonical}" if canonical != name else ""
        asked = f"schedule, {lines[module]}" if module in lines else plan.roles.origin.get(module, "")
        decided = tied or (asked if placement.sharded or module in plan.cuts else "") or NOBODY
        # A bias that a row linear keeps whole was decided on with its weight; nothing of it is declined.
        done = module in plan.cuts or module in plan.experts
        declined = str(plan.left_whole.get(module, "")) or ("" if done else _declined(plan.roles, module))
        made.append(
            Decision(
                name,
                placement.shape,
                plan.local_shape(placement),
                _words(placement),
                decided,
                _gradient(placement),
                plan.tp_facts.gather.get(module, ""),
                declined,
            )
        )
    return fold_decisions(made)


def _declined(roles: Roles, module: str) -> str:
    """Returns why a cut of a module, or of one around it, was declined; empty where none was."""
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
    padded = placement.padded not in (None, placement.shape[placement.axis])
    return words + (f", padded to {placement.padded}" if padded else "")


def _gradient(placement: Placement) -> str:
    if placement.group == "ep":
        return "of its experts, by the tokens of all ranks"
    if placement.sharded:
        return "of its part"
    return "partial, summed over TP" if placement.tp_gradient == "partial" else "the same on every TP rank"


def fold_decisions(decisions: Iterable[Decision]) -> list[Decision]:
    """Folds decisions on parameters that differ in their layer index alone, and are decided alike, into one."""
    groups: dict[Any, list[int]] = {}
    for decision in decisions:
        index = re.search(r"\.(\d+)\.", decision.parameter)
        pattern = decision.parameter
        if index is not None:
            pattern = f"{pattern[: index.start()]}.*.{pattern[index.end() :]}"
        groups.setdefault(replace(decision, parameter=pattern), []).append(int(index[1]) if index else -1)
    return [
        replace(decision, parameter=decision.parameter.replace("*", fold_indices(indices), 1))
        for decision, indices in groups.items()
    ]


def without_rule(plan: Plan) -> list[str]:
    """Returns a line for each operator without a rule that took whole tensors where shards might have done."""
    lines = []
    for operator, paths in sorted(plan.tp_facts.without_rule.items()):
        where = ", ".join(fold_paths(paths)) or "the model's own code"
        lines.append(
            f"{operator} has no rule, so what it takes is whole (in {where}); a rule is registered by "
            f"@megasched.register_op_rule(torch.ops.{operator})"
        )
    return lines


def fold_paths(paths: Iterable[str]) -> list[str]:
    """Folds paths that differ in their layer index alone into one path each, and drops the root's empty path."""
    groups: dict[str, list[int]] = {}
    for path in sorted(paths):
        index = re.search(r"\.(\d+)(?=\.|$)", path)
        pattern = path if index is None else f"{path[: index.start()]}.*{path[index.end() :]}"
        groups.setdefault(pattern, []).append(int(index[1]) if index else -1)
    return [
        pattern.replace("*", fold_indices(sorted(indices)), 1) for pattern, indices in groups.items() if pattern
    ]


def fold_indices(indices: list[int]) -> str:
    """Formats indices: ``0-3`` for neighbours, ``0,3,7`` for others, ``0,2,…,30`` for more than four pieces."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][-1] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    pieces = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    if len(pieces) > LABEL_PIECES:
        pieces = [*pieces[:2], "…", pieces[-1]]
    return ",".join(pieces)
