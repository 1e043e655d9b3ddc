"""Holds the state that the code of modules keeps outside of them, to put it back: in globals, and on classes.

Only what the code names is looked at, in whatever file: other globals of a script may be its data.
"""

from __future__ import annotations

import dis
from collections.abc import Iterable
from functools import lru_cache
from types import CodeType, FunctionType, ModuleType
from typing import Any

from torch import nn

from megasched.definition.code_state.contents import Contents, held_by, is_library, may_keep_state

# Globals of a file with the names that code uses of them; or a class with None: all of its attributes.
_Space = tuple[Any, frozenset[str] | None]


class CodeState:
    """Holds the values of globals and class attributes that code of modules uses, and all that is in these.

    Args:
        modules: whose code it is.
        values: other containers and objects, such as the modules' attributes.
    """

    def __init__(self, modules: Iterable[nn.Module], values: Iterable[Any] = ()) -> None:
        spaces = _used_by(_code_of(modules))
        self._spaces = [(space, names, _values(space, names)) for space, names in spaces]
        self._contents = Contents([*(v for _, _, named in self._spaces for v in named.values()), *values])
        self.holders = self._contents.holders
        self.is_written = self._contents.is_written

    def put_back(self) -> None:
        """Puts back all that has changed, but for values of tensors."""
        for space, names, values in self._spaces:
            now = _values(space, names)
            for name in now.keys() - values.keys():
                _delete(space, name)
            for name, value in values.items():
                if name not in now or now[name] is not value:
                    _set(space, name, value)
        self._contents.put_back()


def _code_of(modules: Iterable[nn.Module]) -> frozenset[Any]:
    """Returns the classes of modules, and the functions in their attributes.

    What is in a function's closure stands there for itself; in a cache the function might keep a model alive.
    """
    code: set[Any] = set()
    for module in modules:
        code.add(type(module))
        code.update(one for one in vars(module).values() if type(one) is FunctionType and not one.__closure__)
    return frozenset(code)


@lru_cache(maxsize=64)
def _used_by(code: frozenset[Any]) -> tuple[_Space, ...]:
    """Returns what the code of classes and functions uses, and that of others which it uses."""
    files: dict[int, tuple[dict[str, Any], set[str]]] = {}
    seen: dict[int, Any] = {}
    waiting: list[Any] = list(code)
    while waiting:
        item = waiting.pop()
        if id(item) in seen:
            continue
        seen[id(item)] = item
        if isinstance(item, type):
            waiting += item.__mro__
            if not is_library(item.__module__):
                waiting += vars(item).values()
        elif isinstance(item, FunctionType):
            waiting += _follow(item, files)
        elif isinstance(item, property):
            waiting += [item.fget, item.fset]
        elif isinstance(item, staticmethod | classmethod):
            waiting.append(item.__func__)
        else:  # such as a table of functions, or an object with methods
            waiting += [*held_by(item), *([type(item)] if may_keep_state(type(item)) else [])]
    kept = [(item, None) for item in seen.values() if isinstance(item, type) and not is_library(item.__module__)]
    return (*((space, frozenset(names)) for space, names in files.values()), *kept)


def _follow(function: FunctionType, files: dict[int, tuple[dict[str, Any], set[str]]]) -> list[Any]:
    """Adds the globals that a function uses to those of their files, and returns what they are."""
    if is_library(function.__globals__.get("__name__", "")):
        return [getattr(function, "__wrapped__", None)]
    names, attributes = _names_in(function.__code__)
    modules = [value for name in names if isinstance(value := function.__globals__.get(name), ModuleType)]
    spaces = [(function.__globals__, names)]
    spaces += [(vars(module), attributes) for module in modules if not is_library(module.__name__)]
    values = held_by(function)
    for space, used in spaces:
        files.setdefault(id(space), (space, set()))[1].update(used)
        values += [space[name] for name in used if name in space]
    return values


def _names_in(code: CodeType) -> tuple[set[str], set[str]]:
    """Returns the names of globals, and of attributes, in a function's code and in functions inside of it."""
    names = {one.argval for one in dis.get_instructions(code) if one.opname.endswith(("_GLOBAL", "_NAME"))}
    attributes = set(code.co_names)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            more = _names_in(inner)
            names |= more[0]
            attributes |= more[1]
    return names, attributes


def _values(space: Any, names: frozenset[str] | None) -> dict[str, Any]:
    if names is None:
        return {name: value for name, value in vars(space).items() if not name.startswith("__")}
    return {name: space[name] for name in names if name in space}


def _set(space: Any, name: str, value: Any) -> None:
    if isinstance(space, type):
        setattr(space, name, value)
    else:
        space[name] = value


def _delete(space: Any, name: str) -> None:
    if isinstance(space, type):
        delattr(space, name)
    else:
        del space[name]
