"""Defines rules for operators that compute nothing and return all elements elsewhere, such as views."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from megasched.analysis.rules.op_call import NeedsWhole, OpCall
from megasched.analysis.rules.table import rule
from megasched.language.tensor_types import ShardDim


@rule("view", "_unsafe_view", "reshape", "_reshape_alias", in_place=False)
def view(call: OpCall) -> ShardDim:
    """Returns the dimension of a view that holds the cut, or its outermost part."""
    x, along = call.only()
    before, after = x.shape, call.outputs[0].shape
    outside = prod(before[: along.dim]) * along.outer
    for dim, size in enumerate(after):
        passed = prod(after[:dim])
        if passed <= outside < passed * size:
            outer, rest = divmod(outside, passed)
            if rest or size % outer:
                break
            components = _in_units(along.components, before[along.dim] // along.outer, size // outer)
            return ShardDim(dim, outer, components, along.heads)
    raise NeedsWhole


def _in_units(components: tuple[int, ...], before: int, after: int) -> tuple[int, ...]:
    """Returns the sizes of components in a view that counts ``after`` (heads) instead of ``before`` (features).

    Raises:
        NeedsWhole: a component is no whole number of them.
    """
    if any(size * after % before for size in components):
        raise NeedsWhole
    return tuple(size * after // before for size in components)


@rule("transpose", in_place=False)
def transpose(call: OpCall) -> ShardDim:
    """Moves the cut with two dimensions that change places."""
    x, along = call.only()
    first, second = (call.arguments[name] % x.dim() for name in ("dim0", "dim1"))
    return replace(along, dim={first: second, second: first}.get(along.dim, along.dim))


@rule("t", in_place=False)
def matrix_transpose(call: OpCall) -> ShardDim:
    """Moves the cut with the two dimensions of a matrix; a vector stays unchanged."""
    x, along = call.only()
    return replace(along, dim=1 - along.dim) if x.dim() == 2 else along


@rule("permute", in_place=False)
def permute(call: OpCall) -> ShardDim:
    """Moves the cut with its dimension, when all dimensions get new places."""
    x, along = call.only()
    return replace(along, dim=call.dims(x).index(along.dim))


@rule("unsqueeze", in_place=False)
def unsqueeze(call: OpCall) -> ShardDim:
    """Moves the cut past a new dimension of size 1."""
    _, along = call.only()
    return replace(along, dim=along.dim + (call.dim(call.outputs[0]) <= along.dim))


@rule("squeeze", in_place=False)
def squeeze(call: OpCall) -> ShardDim:
    """Moves the cut past dimensions of size 1 that go.

    A cut dimension may be of size 1 on a rank, and would go there, too.
    """
    x, along = call.only()
    dims = call.dims(x)
    if along.dim in dims:
        raise NeedsWhole
    return replace(along, dim=along.dim - sum(dim < along.dim and x.shape[dim] == 1 for dim in dims))


@rule("expand", in_place=False)
def expand(call: OpCall) -> ShardDim:
    """Moves the cut past new dimensions in front, while those of size 1 get larger."""
    x, along = call.only()
    return replace(along, dim=along.dim + call.outputs[0].dim() - x.dim())


@rule("repeat", in_place=False)
def repeat(call: OpCall) -> ShardDim:
    """Keeps the cut of a tensor, of which there may be several now along the cut dimension."""
    x, along = call.only()
    repeats: Sequence[int] = call.arguments["repeats"]
    dim = len(repeats) - x.dim() + along.dim
    return replace(along, dim=dim, outer=repeats[dim] * along.outer)


@rule("view_as_real", in_place=False)
def view_as_real(call: OpCall) -> ShardDim:
    """Keeps the cut, as the new dimension for the two parts of a number comes last."""
    _, along = call.only()
    return along


@rule("view_as_complex", in_place=False)
def view_as_complex(call: OpCall) -> ShardDim:
    """Keeps the cut, unless it is along the last dimension, which holds the two parts of a number and goes."""
    x, along = call.only()
    if along.dim == x.dim() - 1:
        raise NeedsWhole
    return along


@rule("constant_pad_nd", in_place=False)
def pad(call: OpCall) -> ShardDim:
    """Keeps the cut of a tensor that is padded or cropped along other dimensions.

    ``pad`` lists the dimensions from the last one on.
    """
    x, along = call.only()
    after = 2 * (x.dim() - 1 - along.dim)
    if any(call.arguments["pad"][after : after + 2]):
        raise NeedsWhole
    return along
