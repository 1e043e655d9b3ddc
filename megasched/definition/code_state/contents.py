"""Holds what containers, objects and generators have in them, at any depth, to put it back."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from types import FunctionType, MethodType, SimpleNamespace
from typing import Any

import torch

from megasched.definition.code_state.holder import Holder, items_of
from megasched.definition.module_copy import PLAIN, filled_cells

_LIBRARIES = frozenset(["torch", "transformers", "megatron", "megasched", "numpy", "builtins"])
_INSTALLED = frozenset(["site-packages", "dist-packages"])
# How deep containers and objects are in each other; what is further in is no state that a forward keeps.
_DEEPEST = 8


class Contents:
    """Holds what containers and objects had in them when it was made, and the versions of the tensors there.

    Args:
        values: where to begin. Objects of the libraries', of Python's own classes and of installed packages are
            left as they are, and so are modules, which are not looked into.
    """

    def __init__(self, values: Iterable[Any]) -> None:
        self._holders: list[Holder] = []
        self._tensors: list[tuple[torch.Tensor, int]] = []
        seen: set[int] = set()
        waiting = [(value, 0) for value in values if type(value) not in PLAIN]
        while waiting:
            value, depth = waiting.pop()
            if id(value) in seen or depth > _DEEPEST:
                continue
            seen.add(id(value))
            if isinstance(value, torch.Tensor):
                if not value.is_inference():  # which has no version
                    self._tensors.append((value, value._version))
                continue
            items = items_of(value)
            if items is not None:
                self._holders.append(Holder(value, items))
            waiting += [(item, depth + 1) for item in held_by(value, items)]

    @property
    def holders(self) -> list[Any]:
        """Returns the containers that were met."""
        return [holder.value for holder in self._holders]

    def put_back(self) -> None:
        """Gives each container that has changed what it had; values of tensors stay."""
        for holder in self._holders:
            holder.put_back()

    def is_written(self) -> bool:
        """Returns whether a tensor in it was written to in place."""
        return any(tensor._version != version for tensor, version in self._tensors)


def held_by(value: Any, items: list[Any] | None = None) -> list[Any]:
    """Returns what a container, an object or a function has in it, but for numbers, text and the like.

    Args:
        items: what a container has in it, where that is there already.
    """
    items = items_of(value) if items is None else items
    return [item for item in (_inside(value) if items is None else items) if type(item) not in PLAIN]


def _inside(value: Any) -> Iterable[Any]:
    """Returns what an object that is no container has in it: its attributes, a function's closure and defaults."""
    if isinstance(value, tuple):
        return value
    if isinstance(value, MethodType):
        return (value.__self__,)
    if isinstance(value, FunctionType):
        if is_library(value.__globals__.get("__name__", "")):
            return ()
        defaults = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
        return (*filled_cells(value).values(), *defaults, vars(value))
    held = getattr(value, "__dict__", None) if may_keep_state(type(value)) else None
    return (held,) if isinstance(held, dict) else ()


def may_keep_state(kind: type) -> bool:
    """Returns whether objects of a class may keep what a definition's code puts in them."""
    if kind is SimpleNamespace:
        return True
    return not issubclass(kind, torch.nn.Module | type) and not is_library(kind.__module__)


@lru_cache(maxsize=4096)
def is_library(module: str) -> bool:
    """Returns whether a module of Python's is of a library or an installed package, and not of a definition."""
    top = module.partition(".")[0]
    if top in _LIBRARIES or top in sys.stdlib_module_names:
        return True
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return not _INSTALLED.isdisjoint(Path(file).parts)
