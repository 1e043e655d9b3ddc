"""Makes the consoles on which commands print."""

from __future__ import annotations

from typing import TextIO

from rich.console import Console


def plain_console(file: TextIO | None = None, *, width: int | None = None, stderr: bool = False) -> Console:
    """Returns a console that prints text as it is; whoever wants a style says it beside the text.

    Names of a user's files and words of errors are printed: ``[x]`` and ``:x:`` in them are no markup.
    """
    return Console(file=file, width=width, stderr=stderr, highlight=False, markup=False, emoji=False)
