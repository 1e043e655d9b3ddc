"""Computes rotary embeddings of queries and keys by one kernel each, compiled from the definition's own function.

Definitions write them as ``q * cos + rotate_half(q) * sin``: ten operations that read and write queries and keys,
and as many in the backward. What is compiled is the function that the attention calls, whatever it computes:
partial, interleaved or scaled embeddings need no code of ours.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from types import CellType, FunctionType
from typing import Any

from torch import nn

from megasched.layers.fused.kernels import one_kernel
from megasched.layers.wrap import Forward, wrap_forward

# How transformers names these functions, in each of its definitions' files.
_PREFIX = "apply_rotary"


def fuse_rotary(model: nn.Module, here: Callable[[str], bool]) -> None:
    """Has the attention modules at the paths for which ``here`` holds call compiled rotary functions.

    Modules and the definition's file stay: only the instance's forward looks the functions up elsewhere.
    """
    for path, module in model.named_modules():
        if not here(path) or "forward" in vars(module):
            continue
        forward = type(module).forward
        named = _rotary_functions(inspect.unwrap(forward))
        rebound = _with_globals(forward, {name: one_kernel(function) for name, function in named.items()})
        if named and rebound is not None:
            wrap_forward(module, partial(_bound, module, rebound))


def _rotary_functions(function: Any) -> dict[str, Callable[..., Any]]:
    """Returns the functions that a forward finds by such a name in its file."""
    if not isinstance(function, FunctionType):
        return {}
    names = [name for name in function.__code__.co_names if name.startswith(_PREFIX)]
    found = {name: function.__globals__.get(name) for name in names}
    return {name: one for name, one in found.items() if isinstance(one, FunctionType)}


class _Globals(dict[str, Any]):
    """Looks names up in what it holds, then in a file's namespace as it is at the time."""

    def __init__(self, own: Mapping[str, Any], others: Mapping[str, Any]) -> None:
        super().__init__(own)
        self._others = others

    def __missing__(self, name: str) -> Any:
        return self._others[name]


def _with_globals(function: Any, own: Mapping[str, Any]) -> Any:
    """Returns a function with some global names of its own, below its decorators.

    A decorator must hold the function in its closure, as one with ``functools.wraps`` does; else None is returned.
    """
    if not isinstance(function, FunctionType):
        return None
    inner = getattr(function, "__wrapped__", None)
    namespace, cells = function.__globals__, function.__closure__
    if inner is None:
        namespace = _Globals(own, namespace)
    else:
        rebound = _with_globals(inner, own)
        held = [cell for cell in cells or () if cell.cell_contents is inner]
        if rebound is None or len(held) != 1:
            return None
        cells = tuple(CellType(rebound) if cell is held[0] else cell for cell in cells or ())
    made = FunctionType(function.__code__, namespace, function.__name__, function.__defaults__, cells)
    made.__kwdefaults__ = function.__kwdefaults__
    made.__dict__.update(function.__dict__)
    made.__qualname__, made.__module__ = function.__qualname__, function.__module__
    return made


def _bound(module: nn.Module, rebound: Callable[..., Any], forward: Forward) -> Forward:
    def fused(*args: Any, **kwargs: Any) -> Any:
        return rebound(module, *args, **kwargs)

    return fused
