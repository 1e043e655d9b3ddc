"""Finds state that a definition's code keeps in Python between calls: counters, flags, lists, random generators.

It looks at attributes of modules, at their classes, at globals of their files, and at what those hold. Of tensors
only the shapes count: a question about their values is seen when the code asks it.
"""

from __future__ import annotations

import random
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Hashable, Iterable, Iterator, MutableMapping, MutableSequence
from itertools import count
from types import FunctionType, MethodType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn

from megasched.definition.module_copy import filled_cells
from megasched.definition.undisturbed import owners_of

_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_MAPS = (dict, OrderedDict, defaultdict)
_LISTS = (list, tuple, deque)
_MODULE = frozenset(vars(nn.Module())) | {"_modules"}
_KNOWN = ("torch", "numpy", "megatron", "megasched")
# Of what is in what is in an attribute; a chain of objects that is longer is no state that anybody counts in.
_DEEPEST = 6


class Spot(NamedTuple):
    """Says where a value is stored.

    Attributes:
        owner: the namespace, mapping or sequence that holds it.
        key: its name, key or index there.
    """

    owner: Any
    key: Any

    def add(self, number: int) -> None:
        """Adds to the number stored there, where its owner can be changed."""
        if isinstance(self.owner, MutableMapping | MutableSequence):
            self.owner[self.key] += number
        elif not isinstance(self.owner, tuple):
            setattr(self.owner, self.key, getattr(self.owner, self.key) + number)


class State:
    """Holds the state of a model's code at one moment.

    Attributes:
        values: name of a value, as the code would write it -> an object that is equal while the value is
            unchanged.
        spots: name of a number -> where it is stored.
        generators: names of random generators and counters.
    """

    def __init__(self, model: nn.Module) -> None:
        self.values: dict[str, Hashable] = {}
        self.spots: dict[str, Spot] = {}
        self.generators: set[str] = set()
        self._seen: set[int] = set()
        for path, module in model.named_modules():
            self._take_module(path, module)
        self._take_outside(model)

    def changed(self, later: State) -> list[str]:
        """Returns the names whose values differ in ``later``, or that only one of the two states has."""
        names = self.values.keys() | later.values.keys()
        return sorted(name for name in names if self.values.get(name, _NONE) != later.values.get(name, _NONE))

    def _take_module(self, path: str, module: nn.Module) -> None:
        held = vars(module)
        for name in held.keys() - _MODULE:
            self._take(f"{path}.{name}".lstrip("."), held[name], Spot(held, name), 0)

    def _take_outside(self, model: nn.Module) -> None:
        for owner in owners_of(model):
            label = f"{owner.__module__}.{owner.__name__}" if isinstance(owner, type) else owner.__name__
            for name, value in list(vars(owner).items()):
                if not name.startswith("__"):
                    self._take(f"{label}.{name}", value, Spot(owner, name), 0)

    def _take(self, name: str, value: Any, spot: Spot, depth: int) -> None:
        if isinstance(value, _PLAIN):
            self.values[name] = (type(value), value)
            if isinstance(value, int | float) and not isinstance(value, bool):
                self.spots[name] = spot
        elif isinstance(value, torch.Tensor):
            self.values[name] = (torch.Tensor, tuple(value.shape))
        elif (told := _of_generator(value)) is not None:
            self.values[name] = told
            self.generators.add(name)
        elif id(value) not in self._seen and depth < _DEEPEST:
            self._seen.add(id(value))
            for key, item, inner in inside(value):
                self._take(f"{name}{key}", item, inner, depth + 1)
            if isinstance(value, Iterable) and hasattr(type(value), "__len__"):
                self.values[f"len({name})"] = len(value)  # type: ignore[arg-type]


_NONE = object()
_NOWHERE = Spot((), 0)


def _of_generator(value: Any) -> Hashable | None:
    """Returns the position of a random generator or a counter; None for any other value."""
    if isinstance(value, count):
        return repr(value)
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, torch.Generator):
        return bytes(value.get_state().cpu().numpy())
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.random.Generator):
        return repr(value.bit_generator.state)
    if numpy is not None and isinstance(value, numpy.random.RandomState):
        return repr(value.get_state())
    return None


def inside(value: Any) -> Iterator[tuple[str, Any, Spot]]:
    """Yields what a value holds: the suffix by which code would write it, the item, and where that is stored."""
    if isinstance(value, _MAPS):
        for key, item in list(value.items()):
            yield f"[{key!r}]", item, Spot(value, key)
    elif isinstance(value, _LISTS):
        for index, item in enumerate(value):
            yield f"[{index}]", item, Spot(value, index)
    elif isinstance(value, set | frozenset):
        yield "", repr(sorted(map(repr, value))), _NOWHERE
    elif isinstance(value, FunctionType):
        for name, cell in filled_cells(value).items():
            yield f" {name}", cell.cell_contents, Spot(cell, "cell_contents")
        for index, item in enumerate(value.__defaults__ or ()):
            yield f" default {index}", item, _NOWHERE
        for name, item in {**vars(value), **(value.__kwdefaults__ or {})}.items():
            yield f".{name}", item, Spot(vars(value), name)
    elif isinstance(value, MethodType):
        yield " self", value.__self__, _NOWHERE
    elif is_looked_into(type(value)):
        held = getattr(value, "__dict__", None)
        for name, item in list(held.items()) if isinstance(held, dict) else ():
            yield f".{name}", item, Spot(held, name)


def is_looked_into(kind: type) -> bool:
    """Returns whether objects of a class may keep a definition's state: not those of Python, torch or Megatron."""
    root = kind.__module__.partition(".")[0]
    if issubclass(kind, nn.Module | torch.Tensor | type):
        return False
    return kind is SimpleNamespace or (root not in _KNOWN and root not in sys.stdlib_module_names)
