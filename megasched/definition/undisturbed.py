"""Undoes the changes that trial calls make to state that a definition's code keeps outside of its modules.

A table that code keeps in a global, on a class or behind ``lru_cache`` would be on meta after a trial, and the run
would find it there. transformers' own code keeps none.

The files of a model's classes are looked at as wholes, with Python's containers that stand there; what is in
containers and objects further in, where the code uses it (``code_state``).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from megasched.definition.code_state.code_state import CodeState
from megasched.definition.module_copy import held_in_closure

_KNOWN = ("torch", "transformers", "megatron", "megasched", "builtins", "abc", "typing")
_CONTAINERS = (list, dict, set)


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Undoes at its end all changes that the code of a model's classes made to global state within its body."""
    owners = owners_of(model)
    before = [(owner, _held(owner)) for owner in owners]
    state = CodeState(model.modules())
    _forget(owners)
    try:
        yield
    finally:
        state.put_back()
        for owner, held in before:
            _restore(owner, held)
        _forget(owners)


def owners_of(model: nn.Module) -> list[Any]:
    """Returns the Python modules in which a model's classes are defined, and the classes in them."""
    from transformers.utils import TRANSFORMERS_DYNAMIC_MODULE_NAME

    kinds = {kind for module in {type(m) for m in model.modules()} for kind in module.__mro__}
    names = {kind.__module__ for kind in kinds if kind.__module__.partition(".")[0] not in _KNOWN}
    # Code that comes with a model is a package of its own.
    top = f"{TRANSFORMERS_DYNAMIC_MODULE_NAME}."
    packages = tuple(f"{name.rpartition('.')[0]}." for name in names if name.startswith(top))
    if packages:
        names |= {name for name in sys.modules if name.startswith(packages)}
    modules = [sys.modules[name] for name in sorted(names) if name in sys.modules]
    written = {v for m in modules for v in vars(m).values() if isinstance(v, type) and v.__module__ in names}
    return [*modules, *(written | {kind for kind in kinds if kind.__module__ in names})]


def _held(owner: Any) -> dict[str, tuple[Any, Any]]:
    """Returns each name's value, and a copy of the value if it is a container."""
    return {
        name: (value, value.copy() if type(value) in _CONTAINERS else None)
        for name, value in vars(owner).items()
        if not name.startswith("__")
    }


def _restore(owner: Any, held: dict[str, tuple[Any, Any]]) -> None:
    now = dict(vars(owner))
    for name in now.keys() - held.keys():
        if not name.startswith("__"):
            delattr(owner, name)
    for name, (value, inside) in held.items():
        if now.get(name) is not value:
            setattr(owner, name, value)
        if isinstance(value, list) and inside is not None:
            value[:] = inside
        elif inside is not None:
            value.clear()
            value.update(inside)


def _forget(owners: list[Any]) -> None:
    """Empties the caches of functions, which is allowed at any time."""
    for owner in owners:
        for value in list(vars(owner).values()):
            for held in (value, *held_in_closure(value)):
                if callable(getattr(held, "cache_clear", None)):
                    held.cache_clear()
