"""Lists for ``megasched primitives`` the primitives of which a schedule can be made."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from megasched.errors import ConfigError, did_you_mean
from megasched.language.registry import call_of, document, get_primitive, has_primitive, list_primitives
from megasched.printing.tables import plain_table


@dataclass(frozen=True)
class PrimitiveReport:
    """Describes one primitive.

    Attributes:
        name: name by which a schedule calls it.
        aliases: other names of the primitive.
        call: the call with its arguments, e.g. ``shard(param, axis)``.
        summary: its purpose, in one sentence.
        documentation: its whole documentation, with the call and the other names.
    """

    name: str
    aliases: tuple[str, ...]
    call: str
    summary: str
    documentation: str


def describe_primitives() -> list[PrimitiveReport]:
    """Returns all primitives, sorted by name."""
    return [describe_primitive(name) for name in list_primitives(name_only=True)]


def describe_primitive(name: str) -> PrimitiveReport:
    """Returns the primitive of this name or alias.

    Raises:
        ConfigError: there is none; the message suggests others.
    """
    if not has_primitive(name):
        names = list_primitives(name_only=True)
        known = [*names, *(alias for other in names for alias in get_primitive(other).aliases)]
        close = difflib.get_close_matches(name, known, n=3)
        raise ConfigError(f"no primitive {name!r}{did_you_mean(close) or '.'} There are: {', '.join(names)}")
    primitive = get_primitive(name)
    summary = (inspect.getdoc(primitive) or "").partition("\n")[0]
    return PrimitiveReport(primitive.name, primitive.aliases, call_of(primitive), summary, document(primitive))


def print_primitives(primitives: Sequence[PrimitiveReport], console: Console) -> None:
    """Prints a table of the primitives with their names and purposes."""
    table = plain_table("primitive", "what it does")
    table.columns[0].no_wrap = True
    for primitive in primitives:
        also = f" (also {', '.join(primitive.aliases)})" if primitive.aliases else ""
        table.add_row(Text(primitive.name, "bold"), Text(primitive.summary + also))
    console.print(table)
    console.print("\nall about one: megasched primitives NAME", style="dim")
