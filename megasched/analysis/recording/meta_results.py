"""What operations give on the meta device, remembered as long as the process lives.

A meta kernel is a function of shapes, strides, dtypes and plain arguments, and torch computes most of them in
Python, at 0.1 to 0.4 ms a call. Layers repeat each other, and so do the runs that make a plan: the first of them
computes, the others remember.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_leaves


class Metadata(NamedTuple):
    """All that a kernel can read of a tensor that has no values."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


# What an operation gave: a tensor, or a list or tuple of such.
type Given = Metadata | tuple[type, list[Given]]

_GIVEN: dict[Hashable, Given] = {}


class MetaResults:
    """Carries out operations on meta; the same one on the same metadata is computed once.

    Kept only are torch's own operations that make new tensors: no views, nothing in place, nothing that gives
    numbers, and no operators of other libraries, which may look at more than their arguments.

    Args:
        given: what is known already, and is added to; by default what this process has computed.
    """

    def __init__(self, given: dict[Hashable, Given] | None = None) -> None:
        self._given = _GIVEN if given is None else given

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What ``func(*args, **kwargs)`` gives."""
        if not _makes_new_tensors(func):
            return func(*args, **kwargs)
        # The default dtype is what whole numbers become where they are divided.
        key = (func, torch.get_default_dtype(), self._described(args), self._described(kwargs))
        try:
            given = self._given.get(key)
        except TypeError:  # an argument that is no plain data
            return func(*args, **kwargs)
        if given is not None:
            return self._made_anew(given)
        output = func(*args, **kwargs)
        given = self._as_given(output)
        if given is not None and not _share_storage(output, (args, kwargs)):
            self._given[key] = given
        return output

    def metadata(self, tensor: torch.Tensor) -> Metadata | None:
        """None for a tensor for which operations may have rules of their own."""
        if type(tensor) not in (torch.Tensor, nn.Parameter):
            return None
        return Metadata(tensor.shape, tensor.stride(), tensor.dtype, tensor.device)

    def has_values(self, metadata: Metadata) -> bool:
        """Whether such a tensor would be more than its metadata."""
        return metadata.device.type != "meta"

    def new(self, metadata: Metadata) -> torch.Tensor:
        """A tensor without values."""
        return torch.empty_strided(metadata.shape, metadata.stride, dtype=metadata.dtype, device="meta")

    def _described(self, value: Any) -> Hashable:
        """What a kernel can read of an argument; unhashable where it is no plain data."""
        if isinstance(value, torch.Tensor):
            return self.metadata(value) or [value]
        if isinstance(value, list | tuple):
            return (type(value), *map(self._described, value))
        if isinstance(value, dict):
            return tuple((key, self._described(item)) for key, item in value.items())
        return (type(value), value)  # 1, 1.0 and True are equal, and mean different dtypes

    def _as_given(self, output: Any) -> Given | None:
        """None for what is not made of tensors without values alone."""
        if isinstance(output, torch.Tensor):
            metadata = self.metadata(output)
            return None if metadata is None or self.has_values(metadata) else metadata
        if type(output) not in (list, tuple):
            return None
        items = [self._as_given(item) for item in output]
        return None if None in items else (type(output), [item for item in items if item is not None])

    def _made_anew(self, given: Given) -> Any:
        if isinstance(given, Metadata):
            return self.new(given)
        kind, items = given
        return kind(self._made_anew(item) for item in items)


@cache
def _makes_new_tensors(func: Any) -> bool:
    """Whether it is torch's own, and the schema says that no argument is written to or handed out again."""
    if not isinstance(func, torch._ops.OpOverload) or func.namespace != "aten":
        return False
    schema = func._schema
    return all(value.alias_info is None for value in (*schema.arguments, *schema.returns))


def _share_storage(output: Any, arguments: Any) -> bool:
    """Whether something is handed out again all the same, as ``_unsafe_view`` does."""
    given, taken = (
        {leaf.untyped_storage()._cdata for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)}
        for value in (output, arguments)
    )
    return not given.isdisjoint(taken)
