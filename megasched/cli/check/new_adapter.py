"""Prints the result of ``megasched new-adapter`` in a terminal."""

from __future__ import annotations

from pathlib import Path
from shlex import quote

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from megasched.printing.tables import plain_table
from megasched.verify.new_adapter.new_adapter import NewAdapter
from megasched.verify.parity import TOLERANCE, Outcome
from megasched.verify.report.verification import VERDICTS


def print_new_adapter(found: NewAdapter, written: Path | None, console: Console) -> None:
    """Prints the findings, and the adapter unless it was written to a file, laid out for 100 columns."""
    cut = f"of its linears {found.planned} are cut by HF's plan, {found.inferred} by what was inferred"
    console.print(Text.assemble((found.model, "bold"), f"  {cut}"))
    console.print(_need(found))
    if written is None:
        console.print()
        console.print(found.source, end="", soft_wrap=True)
    else:
        console.print(f"{written}: an Adapter of {found.lines} lines", soft_wrap=True)
    console.print(Text.assemble(("\nstill open", "bold"), "" if found.still_open else ": nothing"))
    for sentence in found.still_open:
        console.print(Padding(sentence, (0, 0, 0, 2), expand=False))
    if found.outcomes:
        console.print("\na small copy under this adapter, against HF alone", style="bold")
        console.print(_verdicts(found.outcomes))
        console.print(f"equal: all within {TOLERANCE:g}, relative; gradient: of the parameter that is off most")
    console.print(f"\n{_use(written)}", soft_wrap=True)


def _use(written: Path | None) -> str:
    """Returns the line that says what takes the adapter."""
    if written is None:
        return "--output FILE writes it; show, explain, verify, plan and runs take it as --adapter FILE"
    return f"show, explain, verify, plan and runs take it as --adapter {quote(str(written))}"


def _need(found: NewAdapter) -> str:
    """Returns sentences that say whether an adapter is needed, and for what."""
    if not found.layered:
        return (
            "An adapter is of no use yet: the model has no list of layers (below), and Megatron's trainer takes "
            "none without. Its code must hold them in an nn.ModuleList, and call each of them."
        )
    if found.installed:
        return (
            f"There is an adapter already: {found.installed}. This one says what is found without it; "
            "given by --adapter, it stands before that one."
        )
    if found.whole:
        return (
            f"A run finds all of this by itself, and leaves {found.whole} modules whole (below). They are cut "
            "when an adapter says more of them than this one."
        )
    return (
        "No adapter is needed: a run finds all of this by itself. Keep it to pin what was inferred: a release of "
        "transformers that moves a module is then an error, and schedules can speak of roles."
    )


def _verdicts(outcomes: dict[str, Outcome]) -> Table:
    table = plain_table("layout", "verdict", "loss", "logits", "gradient", "norm", "", overflow="fold")
    for layout, outcome in outcomes.items():
        numbers = [outcome.errors.get(name) for name in ("loss", "logits", "gradient", "grad_norm")]
        words = ["" if number is None else f"{number:.0e}" for number in numbers]
        verdict = Text(outcome.verdict, VERDICTS[outcome.verdict])
        table.add_row(layout, verdict, *words, outcome.why)
    return table
