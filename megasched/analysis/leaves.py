"""Tensors in what modules hand to each other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import torch


def leaves_of(value: Any) -> Iterator[tuple[int | None, torch.Tensor]]:
    """Index and tensor of each tensor in a tuple or list; None and the tensor itself where it is one."""
    for index, leaf in enumerate(value) if isinstance(value, (tuple, list)) else [(None, value)]:
        if isinstance(leaf, torch.Tensor):
            yield index, leaf


def entries_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[tuple[tuple[Any, Any], Any]]:
    """(argument, key) and entry of every mapping among a layer's arguments."""
    for argument, value in [*enumerate(args), *kwargs.items()]:
        if isinstance(value, MutableMapping):
            for key, entry in value.items():
                yield (argument, key), entry
