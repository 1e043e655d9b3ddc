"""Holds what one container, closure or generator has in it, to put it back."""

from __future__ import annotations

import random
import sys
from collections import OrderedDict, deque
from operator import is_
from types import CellType
from typing import Any, NamedTuple

import torch

_MAPPINGS = (OrderedDict, dict)  # OrderedDict's own methods keep its order


class Holder(NamedTuple):
    """Says what a container, a closure's cell or a random generator had in it.

    Attributes:
        value: the container itself.
        items: what ``items_of`` returned for it.
    """

    value: Any
    items: list[Any]

    def put_back(self) -> None:
        """Gives it these items again, unless it has them: the same objects, in the same order."""
        now = items_of(self.value) or []
        if len(now) != len(self.items) or not all(map(is_, now, self.items)):
            _fill(self.value, self.items)


def items_of(value: Any) -> list[Any] | None:
    """Returns what a container has in it, a mapping's keys before its values; None for what is no container.

    A random generator has its state in it, and a closure's cell its value.
    """
    if isinstance(value, list):
        return list.copy(value)
    if isinstance(value, _MAPPINGS):
        methods = OrderedDict if isinstance(value, OrderedDict) else dict
        return [*methods.keys(value), *methods.values(value)]
    if isinstance(value, deque | set):
        return list(value)
    if isinstance(value, _generators()):
        return [_state(value)]
    if isinstance(value, CellType):
        try:
            return [value.cell_contents]
        except ValueError:  # of a name that has no value
            return []
    return None


def _fill(holder: Any, items: list[Any]) -> None:
    """Gives a container these items, by the methods of Python's class, which no subclass has changed."""
    if isinstance(holder, list):
        list.__setitem__(holder, slice(None), items)
    elif isinstance(holder, _MAPPINGS):
        methods = OrderedDict if isinstance(holder, OrderedDict) else dict
        methods.clear(holder)
        half = len(items) // 2
        for key, value in zip(items[:half], items[half:], strict=True):
            methods.__setitem__(holder, key, value)
    elif isinstance(holder, deque):
        deque.clear(holder)
        deque.extend(holder, items)
    elif isinstance(holder, set):
        set.clear(holder)
        set.update(holder, items)
    elif isinstance(holder, _generators()):
        _set_state(holder, items[0])
    elif items:
        holder.cell_contents = items[0]
    else:
        del holder.cell_contents


def _generators() -> tuple[type, ...]:
    """Returns the classes of generators of random numbers, whose state counts as what they have in them."""
    numpy = sys.modules.get("numpy")
    more = () if numpy is None else (numpy.random.Generator, numpy.random.RandomState)
    return (random.Random, torch.Generator, *more)


def _state(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    if hasattr(generator, "bit_generator"):
        return generator.bit_generator.state
    return generator.get_state()


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif hasattr(generator, "bit_generator"):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)
