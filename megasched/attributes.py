"""Changes attributes of other packages' modules: addressed by name, checked and undoable."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
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
    return set_attributes({target: value}, rebind=rebind)


def set_attributes(values: Mapping[str, Any], *, rebind: tuple[str, ...] = ()) -> Undo:
    """Sets several targets as ``set_attribute`` does one, in one walk through the modules of ``rebind``.

    Raises:
        ConfigError: a target does not exist; none is changed then.
    """
    changes = [_Change(*locate(target), resolve(target), value) for target, value in values.items()]
    for change in changes:
        setattr(change.owner, change.name, change.new)
    _rebind([(change.name, change.old, change.new) for change in changes], rebind)

    def undo() -> None:
        for change in reversed(changes):
            change.undo()
        _rebind([(change.name, change.new, change.old) for change in changes], rebind)

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


class _Change:
    """Holds an attribute that gets another value."""

    def __init__(self, owner: Any, name: str, old: Any, new: Any) -> None:
        self.owner, self.name, self.old, self.new = owner, name, old, new
        # An inherited attribute must be deleted again, not copied down to the subclass.
        self._own = vars(owner).get(name, _ABSENT)

    def undo(self) -> None:
        if self._own is _ABSENT:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self._own)


def _rebind(changes: Sequence[tuple[str, Any, Any]], packages: tuple[str, ...]) -> None:
    """Changes copies of values in the modules of packages.

    Args:
        changes: name, old and new value of each attribute. Where several have one old value, a copy is of the one
            that has its name, if there is any.
    """
    if not packages:
        return
    by_old: dict[int, dict[str, Any]] = {}
    for name, old, new in changes:
        by_old.setdefault(id(old), {})[name] = new
    # Thousands of modules are loaded, of which few are in a package: the start of its name is what is asked first.
    of_packages = [(name, module) for name, module in list(sys.modules.items()) if name.startswith(packages)]
    inside = tuple(f"{package}." for package in packages)
    for module_name, module in of_packages:
        if f"{module_name}.".startswith(inside) and isinstance(module, ModuleType):
            held = vars(module).copy()
            if by_old.keys().isdisjoint(map(id, held.values())):  # as nearly all
                continue
            for name, value in held.items():
                if (found := by_old.get(id(value))) is not None:
                    setattr(module, name, found.get(name, next(iter(found.values()))))
