"""Prints the result of ``megasched verify`` in a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from megasched.cli.check.new_adapter import VERDICTS
from megasched.cli.output import plain_table
from megasched.verify.locate.bisect import Call
from megasched.verify.locate.locate import Finding
from megasched.verify.numbers import Check
from megasched.verify.verify import Verification


def print_verification(found: Verification, console: Console) -> None:
    """Prints the verdict, every number, and where the first error lies, laid out for 100 columns."""
    what = f"a copy of {found.layers} small layers" if found.small else f"at full size, {found.layers} layers"
    subject = f"[bold]{escape(found.model)}[/] ({what}) under [bold]{escape(found.schedule)}[/]"
    precision = " in bf16" if found.bf16 else ""
    console.print(f"{subject} at {found.layout}{precision}, against HF alone")
    if found.checks:
        console.print(_table(found.checks))
    colour = VERDICTS[found.verdict]
    console.print(f"[bold {colour}]{found.verdict}[/] in {found.seconds:.0f} s", soft_wrap=True)
    if found.why:
        console.print(Padding(escape(found.why), (0, 0, 0, 2), expand=False))
    for note in found.notes:
        console.print(Padding(escape(note), (0, 0, 0, 2), expand=False))
    if found.finding is not None:
        _print_finding(found.finding, console)


def _table(checks: list[Check]) -> Table:
    table = plain_table("compared", "error", "tolerance", "verdict", "largest at", overflow="fold")
    table.columns[1].justify = table.columns[2].justify = "right"
    for check in checks:
        error = "" if check.error is None else f"{check.error:.1e}"
        tolerance = f"{check.tolerance:.1e}" if check.tolerance else ""
        verdict = "[green]equal[/]" if check.equal else "[red]wrong[/]"
        table.add_row(check.name, error, tolerance, verdict, escape(check.worst))
    return table


def _print_finding(finding: Finding, console: Console) -> None:
    ranks = (
        f"rank {finding.ranks[0]}" if len(finding.ranks) == 1 else f"ranks {', '.join(map(str, finding.ranks))}"
    )
    console.print(f"\n[bold]where it goes wrong first[/]: {finding.direction}, {escape(finding.where)}")
    lines = [f"{finding.what} is off by {finding.error:.1e} on {ranks}"]
    if finding.relation:
        lines.append(finding.relation)
    if finding.cause:
        lines.append(f"usual cause: {finding.cause}")
    for line in lines:
        console.print(Padding(escape(line), (0, 0, 0, 2), expand=False))
    _print_calls("asked for there by the schedule:", finding.records, console)
    _print_calls("all is right without:", finding.guilty, console)


def _print_calls(heading: str, calls: Sequence[Call], console: Console) -> None:
    if calls:
        console.print(Padding(heading, (0, 0, 0, 2), expand=False))
    for _, asked, source in calls:
        console.print(Padding(escape(f"{asked}  ({source})"), (0, 0, 0, 4), expand=False))
