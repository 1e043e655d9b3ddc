"""Places in the code of a definition: where it asks for a value, and where it has operations done."""

from __future__ import annotations

import sys
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
    """A place in a definition's code.

    Attributes:
        file, line: as a traceback has them.
        offset: of the instruction, as there may be several in a line.
    """

    file: str
    line: int
    offset: int

    def __str__(self) -> str:
        return f"{Path(self.file).name}:{self.line}"


def asking_site() -> Site | None:
    """Where the definition's code is that has this run; None where that is nobody's but ours."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not _is_definition(frame.f_globals):
        frame = frame.f_back
    return None if frame is None else Site(frame.f_code.co_filename, frame.f_lineno, frame.f_lasti)


def running_lines() -> tuple[Line, ...]:
    """The calls that have led here from the forward of the innermost module on, of the definition's code alone."""
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


def _is_definition(names: dict[str, Any]) -> bool:
    """Whether code with these globals is a definition's."""
    return str(names.get("__name__")).partition(".")[0] not in _OTHERS
