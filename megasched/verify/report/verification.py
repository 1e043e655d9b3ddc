"""Holds the result of a verification, and prints it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from io import StringIO
from typing import Any, Literal

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from megasched.definition.objectives import CAUSAL_LM
from megasched.language.parallel_dims import ParallelDims
from megasched.printing.console import plain_console
from megasched.printing.tables import plain_table
from megasched.verify.locate.bisect import Call
from megasched.verify.locate.locate import Finding
from megasched.verify.numbers import Check

WIDTH = 100
VERDICTS = {"equal": "green", "wrong": "red", "refused": "yellow", "failed": "red"}


@dataclass
class Verification:
    """Holds the result of a verification.

    Attributes:
        schedule: name of it, or how many calls it has.
        hf_model: folder of the model; empty for a module of a program.
        model: name of the architecture, or of the module's class.
        small: whether a small copy stood for the model.
        layers: number of layers that the model had.
        bf16: whether it ran in bf16 instead of float32.
        objective: what the model was trained to do.
        verdict: as an ``Outcome`` has it.
        why: reason of a verdict that is not ``equal``; for ``equal``, a note on differences by rounding.
        finding: place where it goes wrong, if it does and the place was found.
        notes: what was changed in the model, and what no check sees of it.
        lacks: layers of the model that the small copy had none like.
    """

    schedule: str
    hf_model: str
    layout: ParallelDims
    model: str
    small: bool
    layers: int
    verdict: Literal["equal", "wrong", "refused", "failed"]
    why: str = ""
    checks: list[Check] = field(default_factory=list)
    finding: Finding | None = None
    seconds: float = 0.0
    bf16: bool = False
    objective: str = CAUSAL_LM.name
    notes: list[str] = field(default_factory=list)
    lacks: list[str] = field(default_factory=list)

    @property
    def right(self) -> bool:
        return self.verdict == "equal"

    def to_dict(self) -> dict[str, Any]:
        """Returns the result as plain data for JSON."""
        return {**asdict(self), "layout": str(self.layout), "right": self.right}

    def __str__(self) -> str:
        """Returns what ``megasched verify`` prints, without colours."""
        text = StringIO()
        print_verification(self, plain_console(text, width=WIDTH))
        return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def print_verification(found: Verification, console: Console) -> None:
    """Prints the verdict, every number, and where the first error lies, laid out for 100 columns."""
    console.print(_headline(found))
    if found.checks:
        console.print(_table(found.checks))
    colour = VERDICTS[found.verdict]
    console.print(Text.assemble((found.verdict, f"bold {colour}"), f" in {found.seconds:.0f} s"), soft_wrap=True)
    if found.why:
        console.print(Padding(found.why, (0, 0, 0, 2), expand=False))
    for note in found.notes:
        console.print(Padding(note, (0, 0, 0, 2), expand=False))
    if found.finding is not None:
        _print_finding(found.finding, console)


def _headline(found: Verification) -> Text:
    model, schedule = (found.model, "bold"), (found.schedule, "bold")
    if not found.hf_model:
        return Text.assemble(model, " under ", schedule, f" at {found.layout}, against the module alone")
    what = f"a copy of {found.layers} small layers" if found.small else f"at full size, {found.layers} layers"
    trained = "" if found.objective == CAUSAL_LM.name else f" for {found.objective}"
    at = f" at {found.layout}{' in bf16' if found.bf16 else ''}, against HF alone"
    return Text.assemble(model, f"{trained} ({what}) under ", schedule, at)


def _table(checks: list[Check]) -> Table:
    table = plain_table("compared", "error", "tolerance", "verdict", "largest at", overflow="fold")
    table.columns[1].justify = table.columns[2].justify = "right"
    for check in checks:
        error = "" if check.error is None else f"{check.error:.1e}"
        tolerance = f"{check.tolerance:.1e}" if check.tolerance else ""
        verdict = Text("equal", "green") if check.equal else Text("wrong", "red")
        table.add_row(check.name, error, tolerance, verdict, check.worst)
    return table


def _print_finding(finding: Finding, console: Console) -> None:
    ranks = (
        f"rank {finding.ranks[0]}" if len(finding.ranks) == 1 else f"ranks {', '.join(map(str, finding.ranks))}"
    )
    where = f": {finding.direction}, {finding.where}"
    console.print(Text.assemble(("\nwhere it goes wrong first", "bold"), where))
    lines = [f"{finding.what} is off by {finding.error:.1e} on {ranks}"]
    if finding.relation:
        lines.append(finding.relation)
    if finding.cause:
        lines.append(f"usual cause: {finding.cause}")
    for line in lines:
        console.print(Padding(line, (0, 0, 0, 2), expand=False))
    _print_calls("asked for there by the schedule:", finding.records, console)
    _print_calls("all is right without:", finding.guilty, console)


def _print_calls(heading: str, calls: Sequence[Call], console: Console) -> None:
    if calls:
        console.print(Padding(heading, (0, 0, 0, 2), expand=False))
    for _, asked, source in calls:
        console.print(Padding(f"{asked}  ({source})", (0, 0, 0, 4), expand=False))
