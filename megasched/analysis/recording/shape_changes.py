"""Replaces tensors whose shape an operation changes in place, so that earlier events keep the old shape."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import nn


def as_they_were(value: Any, before: Mapping[int, torch.Tensor]) -> Any:
    """Returns a value with some tensors replaced; dataclasses are changed in place.

    Args:
        value: events of a tape, arguments, or outputs of modules.
        before: id of a tensor -> the tensor to put in its place.
    """
    if isinstance(value, torch.Tensor):
        return before.get(id(value), value)
    if is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            setattr(value, field.name, as_they_were(getattr(value, field.name), before))
        return value
    if isinstance(value, nn.Module | type):
        return value
    if hasattr(value, "_make"):
        return type(value)._make(as_they_were(item, before) for item in value)
    if type(value) in (list, tuple):
        return type(value)(as_they_were(item, before) for item in value)
    if type(value) is dict:
        return {key: as_they_were(item, before) for key, item in value.items()}
    return torch.utils._pytree.tree_map_only(torch.Tensor, lambda leaf: before.get(id(leaf), leaf), value)
