"""Collects the lines of the schedule for the page, each with what it asked for, and the links there and back."""

from __future__ import annotations

import linecache
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from megasched.cli.show.module_view import places


@dataclass(frozen=True)
class Link:
    """Represents a link inside of the page: the ``id`` of what it leads to, and its text."""

    target: str
    text: str


@dataclass(frozen=True)
class SourceLine:
    """Represents a line of a schedule's file.

    Attributes:
        id: what a link to it names.
        changed: links to the modules and stages that the line's calls changed.
    """

    id: str
    number: int
    text: str
    changed: list[Link]


@dataclass(frozen=True)
class SourceFile:
    """Holds a file in which a schedule's calls stand; an adapter's own schedule is a file like any other."""

    path: str
    lines: list[SourceLine]

    @property
    def name(self) -> str:
        """Returns its name without the folders, which are of one machine while the page may be sent to another."""
        return Path(self.path).name


def source_files(changed: Mapping[str, list[Link]]) -> list[SourceFile]:
    """Returns the files that the sources of calls name, as far as they can be read.

    Args:
        changed: ``file:line`` of each call -> links to what it changed.
    """
    files: dict[str, dict[int, list[Link]]] = {}
    for source, links in changed.items():
        file, _, number = source.rpartition(":")
        if number.isdecimal():
            files.setdefault(file, {})[int(number)] = links
    found = []
    for file, of_line in files.items():
        linecache.checkcache(file)
        lines = enumerate(linecache.getlines(file), 1)
        shown = [
            SourceLine(f"line-{len(found)}-{number}", number, text.rstrip("\r\n"), of_line.get(number, []))
            for number, text in lines
        ]
        if len(shown) >= max(of_line):  # else it is not the file that was run
            found.append(SourceFile(file, shown))
    return found


def links_of(files: Iterable[SourceFile]) -> dict[str, Link]:
    """Returns the link to each line that made a call, by its ``file:line``."""
    sources = {f"{file.path}:{line.number}": line.id for file in files for line in file.lines if line.changed}
    return {source: Link(target, places([source])) for source, target in sources.items()}
