"""Finds tables in which a definition's code looks up modules or parameters, because a copy has other ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn

from megasched.analysis.notes.python_state import inside
from megasched.definition.undisturbed import owners_of

_TABLES = (Mapping, set, frozenset, WeakSet)
# Of what is in what is in an attribute.
_DEEPEST = 6


def table_of_objects(model: nn.Module) -> tuple[str, str] | None:
    """Returns the name of a table, and the path of a module that it has, or has a parameter of; None without one.

    A dictionary on a module, of modules, is copied with them.
    """
    paths: dict[int, str] = {}
    for path, module in model.named_modules():
        for held in (module, *module.parameters(recurse=False)):
            paths.setdefault(id(held), path)
    for name, table, copied in _tables(model):
        for key in list(table):
            is_object = isinstance(key, nn.Module | torch.Tensor) and not copied
            number = id(key) if is_object else key if type(key) is int else None
            if number in paths:
                return name, paths[number]
    return None


def _tables(model: nn.Module) -> Iterator[tuple[str, Any, bool]]:
    """Yields each table with its name, and whether a copy of the model has its own, of its own modules."""
    seen: set[int] = set()
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if not hasattr(nn.Module, name) and name not in _OF_TORCH:
                yield from _tables_in(f"{path}.{name}".lstrip("."), value, seen, 0, copied=True)
    for owner in owners_of(model):
        for name, value in list(vars(owner).items()):
            if not name.startswith("__"):
                yield from _tables_in(f"{owner.__name__}.{name}", value, seen, 0, copied=False)


_OF_TORCH = frozenset(vars(nn.Module()))


def _tables_in(
    name: str, value: Any, seen: set[int], depth: int, *, copied: bool
) -> Iterator[tuple[str, Any, bool]]:
    if id(value) in seen or depth > _DEEPEST:
        return
    seen.add(id(value))
    if isinstance(value, _TABLES):
        yield name, value, copied and not isinstance(value, WeakKeyDictionary | WeakSet)
    for key, item, _ in inside(value):
        if not isinstance(item, nn.Module | torch.Tensor):
            yield from _tables_in(f"{name}{key}", item, seen, depth + 1, copied=copied)
