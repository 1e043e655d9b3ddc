"""Explains why a module can't be traced: the submodule, the line of its code, and a remedy."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import torch
from torch import nn

from megasched.errors import Problem, ScheduleError
from megasched.graph.effects import Unfit
from megasched.graph.intercept import Lost

_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))


def explain(error: Exception, root: nn.Module, path: str, source: str) -> Problem:
    """Returns the problem of a trace that raised ``error``.

    Args:
        root: the traced module, which is at ``path``.
        source: ``file:line`` of the call.
    """
    if isinstance(error, ScheduleError):
        return error.problems[0]
    unfit = next((one for one in _chain(error) if isinstance(one, Unfit)), None)
    inner, line = _place(error, root) if unfit is None else (unfit.module, "")
    module = ".".join(filter(None, [path, inner]))
    what = f"can't be traced: {_reason(unfit or error)}"
    if line:
        what += f"; at {line}"
    named = unfit or error
    if isinstance(named, Lost | Unfit) and named.remedy:
        remedy = named.remedy
    elif inner:
        remedy = f'keep it a call: sch["{path}"].trace(leaves=["{inner}"])'
    else:
        remedy = "trace the modules inside it, or one around it with this one in leaves"
    return Problem(what, module, source, remedy)


def _reason(error: Exception) -> str:
    if isinstance(error, Lost | Unfit):
        return str(error)
    name = type(error).__name__
    text = (str(error).strip() or name).splitlines()[0]
    chain = [type(one).__name__ for one in _chain(error)]
    if any("DataDependent" in one for one in chain) or "data-dependent" in text.lower():
        return f"what it does depends on the values of a tensor ({text})"
    return f"{name}: {text}"


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yields the error and its causes."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or current.__context__


def _place(error: Exception, root: nn.Module) -> tuple[str, str]:
    """Returns the path of the innermost running module, from the traced one, and ``file:line`` of its code."""
    paths = {id(vars(module)): path for path, module in root.named_modules()}
    for one in _chain(error):
        inner, line = "", ""
        for frame, number in traceback.walk_tb(one.__traceback__):
            if frame.f_code.co_filename.startswith(_LIBRARIES):
                continue
            line = f"{frame.f_code.co_filename}:{number}"
            inner = _running(frame, paths) or inner
        if inner or line:
            return inner, line
    return "", ""


def _running(frame: FrameType, paths: dict[int, str]) -> str:
    owner = frame.f_locals.get("self")
    return paths.get(id(vars(owner)), "") if isinstance(owner, nn.Module) else ""
