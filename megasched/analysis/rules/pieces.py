"""Defines rules for operators that take a tensor apart, or join several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

import torch

from megasched.analysis.rules.op_call import NeedsWhole, OpCall
from megasched.analysis.rules.table import rule
from megasched.language.tensor_types import ON_ALL_RANKS, ShardDim


@rule("select", "unbind")
def without_dim(call: OpCall) -> ShardDim:
    """Follows the cut where a dimension goes, and one place of it is taken, or each of them."""
    x, along = call.only()
    dim = call.dim(x)
    if dim == along.dim:
        raise NeedsWhole
    return replace(along, dim=along.dim - (dim < along.dim))


@rule("slice")
def slice_(call: OpCall) -> ShardDim:
    """Follows the cut through a range of places along a dimension."""
    x, along = call.only()
    dim, told = call.dim(x), call.arguments
    if dim != along.dim:
        return along
    start, end, step = slice(told["start"], told["end"], told["step"]).indices(x.shape[dim])
    if step != 1:
        raise NeedsWhole
    return _between(along, x.shape[dim], start, end)


@rule("split", "split_with_sizes")
def split(call: OpCall) -> list[ShardDim]:
    """Follows the cut through pieces that lie one after the other along a dimension."""
    x, along = call.only()
    dim = call.dim(x)
    if dim != along.dim:
        return [along] * len(call.outputs)
    bounds = pairwise(accumulate((out.shape[dim] for out in call.outputs), initial=0))
    return [_between(along, x.shape[dim], start, end) for start, end in bounds]


def _between(along: ShardDim, size: int, start: int, end: int) -> ShardDim:
    """Returns how the range between two positions is cut; both must be boundaries of components."""
    sizes = along.components or (size,)
    bounds = [0, *accumulate(sizes)]
    if along.outer > 1 or start not in bounds or end not in bounds:
        raise NeedsWhole
    chosen = slice(bounds.index(start), bounds.index(end))
    components, heads = sizes[chosen], along.heads[chosen]
    if set(heads) == {1}:
        return ON_ALL_RANKS
    return ShardDim(along.dim, 1, components if len(components) > 1 else (), heads if any(heads) else ())


@rule("cat")
def cat(call: OpCall) -> ShardDim:
    """Keeps the cut of tensors that are joined along an existing dimension.

    Along the one that is cut, each tensor gives its components.
    """
    dim = call.dim(call.outputs[0])
    if {along.dim for _, along in call.cut} == {dim}:
        return _side_by_side(call, dim)
    return _joined(call, dim)


def _side_by_side(call: OpCall, dim: int) -> ShardDim:
    """Returns the cut of tensors that follow each other along the dimension in which all are cut."""
    if len(call.cut) < len(call.operands) or any(along.outer > 1 for _, along in call.cut):
        raise NeedsWhole
    pieces = [(along.components or (tensor.shape[dim],), along) for tensor, along in call.cut]
    components = tuple(size for sizes, _ in pieces for size in sizes)
    heads = tuple(few for sizes, along in pieces for few in along.heads or (0,) * len(sizes))
    if len(components) == 1:
        return pieces[0][1]
    return ShardDim(dim, components=components, heads=heads if any(heads) else ())


@rule("stack")
def stack(call: OpCall) -> ShardDim:
    """Follows the cut of tensors that are joined along a new dimension."""
    along = _joined(call, None)
    return replace(along, dim=along.dim + (call.dim(call.outputs[0]) <= along.dim))


def _joined(call: OpCall, dim: int | None) -> ShardDim:
    found = {along for _, along in call.cut}
    if len(found) > 1 or next(iter(found)).dim == dim:
        raise NeedsWhole
    along = found.pop()
    # A cache begins as an empty tensor.
    filled: Sequence[torch.Tensor] = [tensor for tensor in call.operands if tensor.numel() > 0] or call.operands
    call.require_same(filled, along, filled[0])
    return along
