"""How ``megasched show --diff`` looks in a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from megasched.cli.show.diff import Change, ShowDiff


def print_diff(diff: ShowDiff, console: Console) -> None:
    """Prints what the second schedule does otherwise than the first, as ``-`` and ``+``; made for 100 columns."""
    console.print(Text.assemble(("- ", "red"), diff.first, "\n", ("+ ", "green"), diff.second))
    if diff.calls_of_first or diff.calls_of_second:
        console.print(Text("\ncalls that only one makes", "bold"))
    for call in diff.calls_of_first:
        console.print(Text(f"  - {call}", "red"))
    for call in diff.calls_of_second:
        console.print(Text(f"  + {call}", "green"))
    if diff.changes:
        console.print(Text("\nmodules that come out otherwise", "bold"))
    for change in diff.changes:
        console.print(_change(change))
    if diff.stages:
        console.print(Text("\npipeline stages", "bold"))
    for change in diff.stages:
        console.print(_change(change))
    if diff.same:
        console.print("\nboth do the same to every module")


def _change(change: Change) -> Text:
    text = Text.assemble(f"  {change.paths}  ", (change.what, "dim"))
    for sign, words, colour in (("-", change.first, "red"), ("+", change.second, "green")):
        text.append(f"\n    {sign} {words or 'nothing'}", colour)
    return text
