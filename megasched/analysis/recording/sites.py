"""Finds the places in a definition's code that ask for values, and the lines that run operations."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch

# Packages whose code is nobody's definition: what they do, they do for whoever calls.
_OTHERS = frozenset(["torch", "megasched", "functools", "contextlib"])
_MODULE_CALL = torch.nn.Module._call_impl.__code__

# By the identity of a code object, which stays its own as long as it is held here: whether it is a definition's.
_CODES: dict[int, tuple[CodeType, bool]] = {}
type Line = tuple[int, int]  # identity of a code object, and the offset in it
type Lines = tuple[str, tuple[Line, ...]]


class Site(NamedTuple):
    """Represents a place in a definition's code.

    Attributes:
        file, line: as in a traceback.
        offset: offset of the bytecode instruction, as a line may have several.
    """

    file: str
    line: int
    offset: int

    def __str__(self) -> str:
        return f"{Path(self.file).name}:{self.line}"


def asking_site() -> Site | None:
    """Returns the innermost place in the definition's code on the call stack; None if it is not on the stack."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not _is_definition(frame.f_globals):
        frame = frame.f_back
    return None if frame is None else Site(frame.f_code.co_filename, frame.f_lineno, frame.f_lasti)


def running_lines() -> tuple[Line, ...]:
    """Returns the definition's code on the call stack, innermost first, up to the innermost module's forward."""
    frame: FrameType | None = sys._getframe(1)
    found: list[Line] = []
    while frame is not None:
        code = frame.f_code
        identity = id(code)
        known = _CODES.get(identity)
        if known is None:
            known = _CODES[identity] = code, _is_definition(frame.f_globals)
        if known[1]:
            found.append((identity, frame.f_lasti))
        elif found and code is _MODULE_CALL:
            break
        frame = frame.f_back
    return tuple(found)


def raising_line(error: BaseException) -> Line | None:
    """Returns the innermost line of the definition's code that an error came through; None if there is none."""
    found = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if _is_definition(frame.f_globals):
            found = id(frame.f_code), frame.f_lasti
    return found


def site_of(lines: tuple[Line, ...]) -> Site | None:
    """Returns the innermost of the lines that ran an operation; None where a tape has none."""
    if not lines:
        return None
    identity, offset = lines[0]
    code, _ = _CODES[identity]
    line = next(line for start, end, line in code.co_lines() if start <= offset < end)
    return Site(code.co_filename, line or code.co_firstlineno, offset)


def _is_definition(names: dict[str, Any]) -> bool:
    """Returns whether code with these globals belongs to a definition."""
    return str(names.get("__name__")).partition(".")[0] not in _OTHERS
