"""How ``megasched primitives`` looks."""

from __future__ import annotations

import difflib
import inspect

from rich.table import Table
from rich.text import Text

from megasched.errors import ConfigError
from megasched.registry import document, get_primitive, has_primitive, list_primitives
from megasched.report.console import report_console


def print_primitives() -> None:
    """A table of all primitives: names and what each is for."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("primitive", no_wrap=True)
    table.add_column("what it does")
    for name in list_primitives(name_only=True):
        primitive = get_primitive(name)
        also = f" (also {', '.join(primitive.aliases)})" if primitive.aliases else ""
        documentation = inspect.getdoc(primitive) or ""
        table.add_row(Text(name, "bold"), Text(documentation.partition("\n")[0] + also))
    console = report_console()
    console.print(table)
    console.print("\nall about one: megasched primitives NAME", style="dim")


def print_primitive(name: str) -> None:
    """The documentation of one primitive.

    Raises:
        ConfigError: there is none of this name; suggests others.
    """
    if not has_primitive(name):
        names = list_primitives(name_only=True)
        known = [*names, *(alias for other in names for alias in get_primitive(other).aliases)]
        close = difflib.get_close_matches(name, known, n=3)
        hint = f"; did you mean {' or '.join(close)}?" if close else ""
        raise ConfigError(f"no primitive {name!r}{hint} There are: {', '.join(names)}")
    print(document(get_primitive(name)))
