"""Changes attributes of other packages' modules: addressed by name, checked and undoable."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
        rebind: top-level packages, e.g. ``("megatron",)``, in whose loaded modules a copy made by
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
    if any(_walk.is_stale(resolve(target)) for target in values):
        _walk.go()
    changes = [_Change(*locate(target), resolve(target), value) for target, value in values.items()]
    for change in changes:
        setattr(change.owner, change.name, change.new)
    _walk.change_copies([(change.name, change.old, change.new) for change in changes], rebind)

    def undo() -> None:
        for change in reversed(changes):
            change.undo()
        _walk.change_copies([(change.name, change.new, change.old) for change in changes], rebind)

    return undo


@contextmanager
def in_one_walk() -> Iterator[None]:
    """Changes the copies of all that is set and undone in its body in one walk through the modules, at its end.

    There are hundreds of modules, so that the walk is most of what a change costs. Its body must not call what it
    changes.
    """
    _walk.waits += 1
    try:
        yield
    finally:
        _walk.waits -= 1
        if not _walk.waits:
            _walk.go()


def wrap_attribute(target: str, call: Callable[..., Any], *, rebind: tuple[str, ...] = ()) -> Undo:
    """Makes a call of the function ``target`` be ``call(function, *args, **kwargs)``; returns the undo.

    Args:
        rebind: as for `set_attribute`.

    Raises:
        ConfigError: the target does not exist.
    """
    function = resolve(target)

    @wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return call(function, *args, **kwargs)

    return set_attribute(target, wrapped, rebind=rebind)


def call_after(target: str, end: Callable[[], None], *, rebind: tuple[str, ...] = ()) -> Undo:
    """Has ``end`` called when the function ``target`` returns or raises; otherwise as ``wrap_attribute``."""

    def ended(function: Callable[..., Any], /, *given: Any, **named: Any) -> Any:
        try:
            return function(*given, **named)
        finally:
            end()

    return wrap_attribute(target, ended, rebind=rebind)


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Runs its body with another value of an attribute of an object, and then restores what the object had."""
    change = _Change(owner, name, None, value)
    setattr(owner, name, value)
    try:
        yield
    finally:
        change.undo()


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


class _Walk:
    """Collects changes of copies, and makes them in one walk through the modules that hold them.

    Attributes:
        waits: how many ``in_one_walk`` are entered.
    """

    def __init__(self) -> None:
        self.waits = 0
        # Package -> id of a value that copies may have, the value itself, and name -> what a copy is to have.
        # Where several attributes had one value, a copy is of the one that has its name, if there is any.
        self._changes: dict[str, dict[int, tuple[Any, dict[str, Any]]]] = {}

    def change_copies(self, changes: Sequence[tuple[str, Any, Any]], packages: tuple[str, ...]) -> None:
        """Adds name, old and new value of attributes that change at once."""
        for package in packages:
            known = self._changes.setdefault(package, {})
            by_old: dict[int, dict[str, Any]] = {}
            for name, old, new in changes:
                by_old.setdefault(id(old), {})[name] = new
            for _, named in known.values():  # what a copy would have been changed to has changed since
                named.update({n: _of_name(by_old[id(v)], n) for n, v in named.items() if id(v) in by_old})
            for name, old, new in changes:
                known.setdefault(id(old), (old, {}))[1].setdefault(name, new)
        if not self.waits:
            self.go()

    def is_stale(self, value: Any) -> bool:
        """Returns whether the walk will change copies of this value."""
        return any(id(value) in known for known in self._changes.values())

    def go(self) -> None:
        """Makes the walk."""
        changes = self._changes
        self._changes = {}
        # Thousands of modules are loaded, of which few are in a package.
        for module_name, module in list(sys.modules.items()) if changes else ():
            known = changes.get(module_name.partition(".")[0])
            if not known or not isinstance(module, ModuleType):
                continue
            held = vars(module).copy()
            if known.keys().isdisjoint(map(id, held.values())):  # as nearly all
                continue
            for name, value in held.items():
                if (found := known.get(id(value))) is not None:
                    setattr(module, name, _of_name(found[1], name))


def _of_name(named: Mapping[str, Any], name: str) -> Any:
    return named[name] if name in named else next(iter(named.values()))


_walk = _Walk()
