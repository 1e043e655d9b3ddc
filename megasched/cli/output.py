"""Prints the results of commands, as JSON or for a reader, and formats amounts in few characters."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.console import Console

from megasched.json_output import print_json
from megasched.printing.console import plain_console

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

# Columns of a report that goes to a file or a pipe.
PIPE_WIDTH = 100
# Of a list with a line for each entry, which is cut nowhere there.
LIST_WIDTH = 1000
# Of a value in the arithmetic that training runs in.
BYTES_16_BITS = 2


def report_console(pipe_width: int = PIPE_WIDTH) -> Console:
    """Returns a console on standard output, which has colours and its own width when it is a terminal."""
    width = None if sys.stdout.isatty() or os.environ.get("COLUMNS") else pipe_width
    return plain_console(width=width)


def print_found[R: DataclassInstance](found: R, view: Callable[[R, Console], None], *, as_json: bool) -> None:
    """Prints the result of a command: as JSON, its fields unless it has a ``to_dict``, or as ``view`` shows it."""
    if as_json:
        print_json(found.to_dict() if hasattr(found, "to_dict") else asdict(found))
    else:
        view(found, report_console())


def format_count(count: int) -> str:
    """Returns a count in few characters: ``8.03 B``, ``124.4 M``, ``61,440``."""
    for unit, size in (("T", 10**12), ("B", 10**9), ("M", 10**6)):
        if count >= size:
            value = count / size
            return f"{value:.2f} {unit}" if value < 10 else f"{value:.1f} {unit}"
    return f"{count:,}"


def format_bytes(count: float) -> str:
    """Returns a number of bytes in few characters: ``1.50 GiB``, ``12.0 MiB``, ``512 B``."""
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            value = count / size
            return f"{value:.2f} {unit}" if value < 10 else f"{value:.1f} {unit}"
    return f"{count:.0f} B"


def format_seconds(seconds: float) -> str:
    """Returns seconds in few characters: ``6.76 s``, ``431.40 ms``."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.2f} ms"
