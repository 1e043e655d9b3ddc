"""Changes attributes of other packages' modules: addressed by name, checked and undoable."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable
from functools import wraps
from types import ModuleType
from typing import Any

from megasched.errors import ConfigError

Undo = Callable[[], None]

_ABSENT = object()


def locate(target: str) -> tuple[Any, str]:
    """Imports the module of ``"module:attr"`` or ``"module:Class.attr"``; returns the attribute's owner and name.

    Raises:
        ConfigError: the module can't be imported or an attribute on the way does not exist.
    """
    module_name, _, path = target.partition(":")
    try:
        owner: Any = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(f"{target}: can't import {module_name}: {error}") from error
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent, _ABSENT)
        if owner is _ABSENT:
            raise ConfigError(f"{target}: {module_name} has no {parent}")
    return owner, name


def resolve(target: str) -> Any:
    """Returns the current value of the attribute that ``target`` names.

    Raises:
        ConfigError: nothing has that name.
    """
    owner, name = locate(target)
    value = getattr(owner, name, _ABSENT)
    if value is _ABSENT:
        raise ConfigError(f"{target}: no such attribute")
    return value


def set_attribute(target: str, value: Any, *, rebind: tuple[str, ...] = ()) -> Undo:
    """Sets ``target`` to ``value`` and returns a function that restores the old state.

    Args:
        target: ``"module:attr"`` or ``"module:Class.attr"``; it must exist.
        value: the new attribute.
        rebind: packages, e.g. ``("megatron",)``, in whose loaded modules a copy made by
            ``from module import attr`` is changed too. The undo changes copies back as well, also in modules
            that were loaded in between.

    Raises:
        ConfigError: the target does not exist.
    """
    owner, name = locate(target)
    old = resolve(target)
    # An inherited attribute must be deleted again, not copied down to the subclass.
    own = vars(owner).get(name, _ABSENT)
    setattr(owner, name, value)
    _rebind(old, value, rebind)

    def undo() -> None:
        if own is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, own)
        _rebind(value, old, rebind)

    return undo


def call_after(target: str, end: Callable[[], None], *, rebind: tuple[str, ...] = ()) -> Undo:
    """Wraps the function ``target`` so that ``end`` is called when it returns or raises; returns the undo.

    Args:
        rebind: as for `set_attribute`.

    Raises:
        ConfigError: the target does not exist.
    """
    function = resolve(target)

    @wraps(function)
    def ended(*given: Any, **named: Any) -> Any:
        try:
            return function(*given, **named)
        finally:
            end()

    return set_attribute(target, ended, rebind=rebind)


def undo_all(undos: Iterable[Undo]) -> None:
    """Runs undos in the reverse of the order in which they were made."""
    for undo in reversed(list(undos)):
        undo()


def _rebind(old: Any, new: Any, packages: tuple[str, ...]) -> None:
    if not packages:
        return
    # Thousands of modules are loaded, of which few are in a package: the start of its name is what is asked first.
    of_packages = [(name, module) for name, module in list(sys.modules.items()) if name.startswith(packages)]
    inside = tuple(f"{package}." for package in packages)
    for module_name, module in of_packages:
        if f"{module_name}.".startswith(inside) and isinstance(module, ModuleType):
            for name in [name for name, value in list(vars(module).items()) if value is old]:
                setattr(module, name, new)
