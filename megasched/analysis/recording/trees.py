"""Finds the tensors in arguments and outputs of modules, and copies these structures as they are at one moment."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from megasched.definition.module_copy import PLAIN

_SHARED = (torch.Tensor, nn.Module)


def leaves_of(value: Any) -> Iterator[tuple[int | None, torch.Tensor]]:
    """Yields index and tensor of each tensor in a tuple or list, or None and the value if that is a tensor."""
    for index, leaf in enumerate(value) if isinstance(value, (tuple, list)) else [(None, value)]:
        if isinstance(leaf, torch.Tensor):
            yield index, leaf


def entries_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[tuple[tuple[Any, Any], Any]]:
    """Yields ``(argument, key)`` and entry of every mapping among a layer's arguments."""
    for argument, value in [*enumerate(args), *kwargs.items()]:
        if isinstance(value, MutableMapping):
            for key, entry in value.items():
                yield (argument, key), entry


def snapshot(value: Any) -> Any:
    """Returns the same tensors in copies of the objects that a forward may change, such as a key-value cache."""
    if type(value) in (tuple, list):
        return type(value)(snapshot(item) for item in value)
    if type(value) is dict:
        return {key: snapshot(item) for key, item in value.items()}
    if type(value) in PLAIN or isinstance(value, _SHARED):
        return value
    copied = lambda leaf: leaf if isinstance(leaf, _SHARED) else _copy(leaf)  # noqa: E731
    return torch.utils._pytree.tree_map(copied, value)


def _copy(value: Any) -> Any:
    with _SharedTensors():
        return copy.deepcopy(value)


class _SharedTensors(TorchFunctionMode):
    """Makes a deep copy share the original's tensors, because a tensor with a gradient can't be copied."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return args[0] if func is torch.Tensor.__deepcopy__ else func(*args, **(kwargs or {}))
