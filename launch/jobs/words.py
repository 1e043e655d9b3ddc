"""Refuses values that no argument or variable of a program can hold, before the program is started."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megasched.errors import ConfigError
from megasched.reading.files import printable
from megasched.reading.forms import unsound_text

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

# Of one argument or variable, its end included, in bytes (MAX_ARG_STRLEN: 32 pages, execve(2)).
LONGEST = 32 * 4096


def refuse_unusable(job: DataclassInstance) -> None:
    """Checks every word of a job, before anything of it is written.

    Raises:
        ConfigError: a field has a NUL, is no UTF-8 or is too long for the kernel, or the job is as a whole.
    """
    for field in fields(job):
        for name, word in _words(field.name, getattr(job, field.name)):
            if why := unsound_text(word) or _too_long(word):
                raise ConfigError(printable(f"{name} of the job: {why}; no program can be started with it"))
    total = sum(len(word) + 9 for field in fields(job) for _, word in _words("", getattr(job, field.name)))
    most = os.sysconf("SC_ARG_MAX") // 2  # the environment is in it, too
    if total > most:
        raise ConfigError(f"the job's words have {total} bytes together; a program is started with {most} at most")


def _words(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yields the place and the text of every word in a value."""
    match value:
        case str():
            yield name, value
        case Path():
            yield name, str(value)
        case Mapping():
            for key, item in value.items():
                yield f"{name} {printable(str(key))[:80]}", f"{key}={item}"
        case Sequence():
            for index, item in enumerate(value):
                yield from _words(f"{name}[{index}]", item)


def _too_long(word: str) -> str:
    length = len(word.encode("utf-8", "surrogatepass")) + 1
    return f"{word:.40}... has {length} bytes, the kernel takes {LONGEST}" if length > LONGEST else ""
