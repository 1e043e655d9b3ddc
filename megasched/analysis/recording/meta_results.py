"""Remembers the results of operations on the meta device for the life of the process.

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
    """Holds all that a kernel can read of a tensor without values."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


# What an operation gave: a tensor, or a list or tuple of such.
type Given = Metadata | tuple[type, list[Given]]

_GIVEN: dict[Hashable, Given] = {}


class MetaResults:
    """Carries out operations on meta, and computes each one once for the same metadata.

    It keeps only torch's own operations that make new tensors: no views, nothing in place, nothing that returns
    numbers, and no operators of other libraries, which may look at more than their arguments.

    Args:
        given: results to start from and to add to; by default those that this process has computed.
    """

    def __init__(self, given: dict[Hashable, Given] | None = None) -> None:
        self._given = _GIVEN if given is None else given

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns the output of ``func(*args, **kwargs)``."""
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
        """Returns a tensor's metadata, or None for a tensor class that may have rules of its own."""
        if type(tensor) not in (torch.Tensor, nn.Parameter):
            return None
        return Metadata(tensor.shape, tensor.stride(), tensor.dtype, tensor.device)

    def has_values(self, metadata: Metadata) -> bool:
        """Returns whether a tensor with this metadata would have values."""
        return metadata.device.type != "meta"

    def new(self, metadata: Metadata) -> torch.Tensor:
        """Returns a tensor without values."""
        return torch.empty_strided(metadata.shape, metadata.stride, dtype=metadata.dtype, device="meta")

    def _described(self, value: Any) -> Hashable:
        """Returns a key for what a kernel can read of an argument; unhashable where that is no plain data."""
        if isinstance(value, torch.Tensor):
            return self.metadata(value) or [value]
        if isinstance(value, list | tuple):
            return (type(value), *map(self._described, value))
        if isinstance(value, dict):
            return tuple((key, self._described(item)) for key, item in value.items())
        return (type(value), value)  # 1, 1.0 and True are equal, and mean different dtypes

    def _as_given(self, output: Any) -> Given | None:
        """Returns the metadata of an output; None unless it consists of tensors without values alone."""
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
    """Returns whether an operation is torch's own, and by its schema neither writes to nor returns an argument."""
    if not isinstance(func, torch._ops.OpOverload) or func.namespace != "aten":
        return False
    schema = func._schema
    return all(value.alias_info is None for value in (*schema.arguments, *schema.returns))


def _share_storage(output: Any, arguments: Any) -> bool:
    """Returns whether an output shares storage with an argument, as ``_unsafe_view`` does despite its schema."""
    given, taken = (
        {leaf.untyped_storage()._cdata for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)}
        for value in (output, arguments)
    )
    return not given.isdisjoint(taken)
