"""How ``megasched primitives`` looks."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from megasched.cli.show.primitives import PrimitiveReport


def print_primitives(primitives: Sequence[PrimitiveReport], console: Console) -> None:
    """A table: names and what each is for."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("primitive", no_wrap=True)
    table.add_column("what it does")
    for primitive in primitives:
        also = f" (also {', '.join(primitive.aliases)})" if primitive.aliases else ""
        table.add_row(Text(primitive.name, "bold"), Text(primitive.summary + also))
    console.print(table)
    console.print("\nall about one: megasched primitives NAME", style="dim")


def print_primitive(primitive: PrimitiveReport) -> None:
    """The documentation of one primitive."""
    print(primitive.documentation)
