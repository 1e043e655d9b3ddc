"""Reads the lines of a log: text of several programs at once, in any encoding, and of any length."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from megasched.reading.files import MIB, Expected, open_regular

LOG = Expected("a log of a run")
# Of one line; what is longer is none that is looked for, and comes in pieces.
LONGEST = MIB


def log_lines(path: str | os.PathLike[str]) -> Iterator[str]:
    """Yields the lines with their ends; what is not UTF-8 is replaced.

    Raises:
        ConfigError: it can't be read, or is no regular file.
    """
    with open_regular(path, LOG) as file:
        while line := file.readline(LONGEST):
            yield line.decode(errors="replace")


def read_log(path: Path) -> str:
    """Reads the whole of a short log."""
    return "".join(log_lines(path))
