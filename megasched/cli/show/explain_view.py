"""How ``megasched explain`` looks in a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from megasched.cli.show.explain import Explanation
from megasched.plan.decisions import Decision
from megasched.trainer.evidence.compatibility import of_unchecked_options


def print_explanation(explanation: Explanation, console: Console) -> None:
    """Prints a few lines a parameter; made for 100 columns."""
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
    if decision.declined:
        text.append(f"\n  not done: {decision.declined}", "yellow")
    return text
