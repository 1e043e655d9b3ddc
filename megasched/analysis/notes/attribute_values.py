"""Compares what modules' attributes hold, beside modules, parameters and buffers: a graph is made for that."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from megasched.definition.instances import Itself
from megasched.definition.module_copy import PLAIN

_OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"training"}


def attributes_of(module: nn.Module) -> Iterator[tuple[str, Hashable]]:
    """Yields the names of a module's attributes in their order, each with something equal for equal values.

    Of a tensor only shape and type count: its values are read when a graph runs.
    """
    for name, value in vars(module).items():
        if name not in _OF_EVERY_MODULE:
            yield name, _comparable(value)


def _comparable(value: Any) -> Hashable:
    kind = type(value)
    if kind in PLAIN:
        return kind, value
    if kind is list or kind is tuple:
        return kind, tuple(map(_comparable, value))
    if kind is dict:
        return kind, tuple((_comparable(key), _comparable(item)) for key, item in value.items())
    if kind is partial:
        return kind, Itself(value.func), _comparable(value.args), _comparable(value.keywords)
    if isinstance(value, torch.Tensor):
        return kind, value.shape, value.dtype, value.device
    return Itself(value)
