"""Makes the tables of what commands and reports print."""

from __future__ import annotations

from rich.console import OverflowMethod
from rich.table import Table
from rich.text import Text


def plain_table(*headings: str, overflow: OverflowMethod = "ellipsis") -> Table:
    """Returns a table without lines that has these columns; rich applies ``overflow`` to each of them.

    Headings may name files of a user's, in which brackets are no markup.
    """
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for heading in headings:
        table.add_column(Text(heading), overflow=overflow)
    return table
