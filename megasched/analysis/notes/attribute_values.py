"""Compares what modules' attributes hold, beside modules, parameters and buffers: a graph is made for that."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from megasched.analysis.notes.python_state import is_looked_into
from megasched.definition.instances import Itself
from megasched.definition.module_copy import PLAIN

# A longer container in an object, such as a config with names of labels, takes too long to compare each time.
_MANY = 64
_OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"training"}


def attributes_of(module: nn.Module, seen: set[int] | None = None) -> Iterator[tuple[str, Hashable]]:
    """Yields the names of a module's attributes in their order, each with something equal for equal values.

    Of a tensor only shape and type count: its values are read when a graph runs. An object such as a config is
    that object, with equal attributes.

    Args:
        seen: ids of objects whose attributes count already; those of this module are added.
    """
    seen = set() if seen is None else seen
    for name, value in vars(module).items():
        if name not in _OF_EVERY_MODULE:
            yield name, _comparable(value, seen)


def _comparable(value: Any, seen: set[int]) -> Hashable:
    kind = type(value)
    if kind in PLAIN:
        return kind, value
    if kind is list or kind is tuple:
        return kind, tuple(_comparable(item, seen) for item in value)
    if kind is dict:
        return kind, tuple((_comparable(key, seen), _comparable(item, seen)) for key, item in value.items())
    if kind is partial:
        return kind, Itself(value.func), _comparable(value.args, seen), _comparable(value.keywords, seen)
    if isinstance(value, torch.Tensor):
        return kind, value.shape, value.dtype, value.device
    if id(value) not in seen and is_looked_into(kind) and isinstance(getattr(value, "__dict__", None), dict):
        seen.add(id(value))
        held = {name: item for name, item in vars(value).items() if not _is_table(item)}
        return Itself(value), _comparable(held, seen)
    return Itself(value)


def _is_table(value: Any) -> bool:
    return isinstance(value, dict | list | tuple) and len(value) > _MANY
