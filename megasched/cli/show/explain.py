"""Explains for ``megasched explain`` every decision on a model's parameters, and context parallelism."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.text import Text

from megasched.cli.show.report import AUTO, refuse_length
from megasched.errors import ConfigError
from megasched.language.parallel_dims import ParallelDims
from megasched.plan.decisions import Decision, decisions_of, fold_paths, without_rule
from megasched.plan.plan import Plan
from megasched.trainer.evidence.compatibility import of_unchecked_options, unchecked_options, verify_command
from megasched.trainer.losses.definition_loss import loss_lines
from megasched.trainer.session import open_session

NAMED = 4  # names of parameters, where none matches


@dataclass(frozen=True)
class Explanation:
    """Holds all decisions for one model at one layout, in the order of the definition's parameters.

    Attributes:
        context: what context parallelism does, in words; empty without it.
        without_rule: lines on operators without a registered rule, which therefore take whole tensors.
        unchecked_options: see ``ShowReport``.
        check: the command that would check these options.
        loss: remark on a loss that the definition's own code computes; empty where it does not.
    """

    model: str
    layout: ParallelDims
    decisions: list[Decision]
    context: tuple[str, ...] = ()
    without_rule: tuple[str, ...] = ()
    unchecked_options: tuple[str, ...] = ()
    check: str = ""
    loss: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Returns the explanation as plain data for JSON."""
        decisions = [asdict(decision) for decision in self.decisions]
        return {
            "model": self.model,
            "layout": vars(self.layout),
            "decisions": decisions,
            "context": self.context,
            "without_rule": self.without_rule,
            "unchecked_options": self.unchecked_options,
            "check": self.check,
            "loss": self.loss,
        }


def explain_schedule(
    schedule: str,
    hf_model: str,
    layout: ParallelDims,
    *,
    only: str = "**",
    sequence_length: int | None = None,
    overrides: Sequence[str] = (),
    trust_remote_code: bool = False,
    objective: str | None = None,
    adapter: str | None = None,
) -> Explanation:
    """Plans a schedule as a run would, and explains the placement of every parameter.

    Args:
        only: glob of the parameters to explain, as for a schedule's paths.
        sequence_length: ``--seq-length`` of the run; by default 4096, or all that the model has positions for.

    Raises:
        ConfigError, ScheduleError: anything that a run would refuse about model, schedule and layout, or no
            parameter matches the glob.
    """
    asked: dict[str, Any] = {
        "overrides": overrides,
        "trust_remote_code": trust_remote_code,
        "objective": objective,
        "adapter": adapter,
    }
    session = open_session(schedule, hf_model, layout, **asked)
    session.runs.with_lines = True
    if sequence_length is not None:
        refuse_length(layout, sequence_length)
        session.runs.length = sequence_length  # the plan has to hold for it
    plan = session.plan
    decisions = decisions_of(plan, by_user=schedule != AUTO, only=only)
    if not decisions:
        raise ConfigError(f"--parameter {only}: {_no_match(plan, only)}")
    told = context_lines(plan), tuple(without_rule(plan))
    return Explanation(
        type(session.definition).__name__,
        layout,
        decisions,
        *told,
        tuple(unchecked_options(session.definition)),
        verify_command(schedule, hf_model, layout, **asked),
        tuple(loss_lines(plan)),
    )


def _no_match(plan: Plan, only: str) -> str:
    """Returns that no parameter matches, with the names that a misspelt one comes close to, or how names look."""
    misspelt = not set(only) & set("*?[")
    close = difflib.get_close_matches(only, plan.canonical, n=2) if misspelt else []
    if close:
        return f"no parameter of the model has that name; there is {' and '.join(close)}"
    names = fold_paths(plan.canonical)
    some = names[:: max(1, len(names) // NAMED)][:NAMED]
    return (
        f"it matches none of the model's parameters, whose names look like {', '.join(some)}. "
        "`*` stands for what is between two dots, `**` for any number of these"
    )


def context_lines(plan: Plan) -> tuple[str, ...]:
    """Returns sentences on what context parallelism does, with layers folded; empty without it."""
    if plan.cp_facts is None:
        return ()
    lines = [f"each CP rank runs the definition on 2 of {2 * plan.layout.cp} pieces of a sequence"]
    if plan.cp_facts.attention:
        lines.append(f"queries meet the keys of all CP ranks: {', '.join(fold_paths(plan.cp_facts.attention))}")
    if plan.cp_facts.regions:
        lines.append(f"run on whole sequences by each CP rank: {', '.join(fold_paths(plan.cp_facts.regions))}")
    return tuple(lines)


def print_explanation(explanation: Explanation, console: Console) -> None:
    """Prints a few lines for each parameter, laid out for 100 columns."""
    console.print(Text.assemble((explanation.model, "bold"), f" on {explanation.layout}\n"))
    told = [*explanation.context, *explanation.without_rule, *explanation.loss]
    if explanation.unchecked_options:
        told.append(of_unchecked_options(list(explanation.unchecked_options), explanation.check))
    for line in told:
        console.print(Text(line))
    if told:
        console.print()
    for decision in explanation.decisions:
        console.print(_lines(decision))


def _lines(decision: Decision) -> Text:
    text = Text.assemble((decision.parameter, "bold"), f"  {list(decision.shape)}")
    if decision.local_shape != decision.shape:
        text.append(f" → {list(decision.local_shape)}")
    text.append(f"\n  {decision.placement}; gradient {decision.gradient}")
    text.append(f"\n  {decision.decided_by}", "cyan")
    if decision.gathered:
        text.append(f"\n  its output is gathered: {decision.gathered}", "yellow")
    if decision.declined:
        text.append(f"\n  not done: {decision.declined}", "yellow")
    return text
