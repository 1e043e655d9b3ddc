"""Defines rules for operators that take each element by itself, or make new tensors in a given one's shape."""

from __future__ import annotations

from dataclasses import replace

import torch

from megasched.analysis.rules.op_call import NeedsWhole, OpCall
from megasched.analysis.rules.table import rule
from megasched.language.tensor_types import ShardDim


@rule("copy_")
def pointwise(call: OpCall) -> list[ShardDim]:
    """Returns the cut of operators that torch tags as pointwise, whose operands are broadcast."""
    return [_broadcast(call, out) for out in call.outputs]


def _broadcast(call: OpCall, out: torch.Tensor) -> ShardDim:
    """Returns the cut of an output, after aligning dimensions at the right.

    Whole operands must be constant along the cut dimension.
    """
    found = {replace(along, dim=along.dim - tensor.dim() + out.dim()) for tensor, along in call.cut}
    if len(found) > 1:
        raise NeedsWhole
    (along,) = found
    call.require_same(call.operands, along, out)
    return along


@rule("clone", "detach", "alias", "contiguous", "_to_copy", "lift_fresh", "fill", "zero", "hardswish")
@rule("bernoulli", in_place=False)
@rule("native_dropout", "bernoulli_", "uniform_", "normal_", "exponential_", "log_sigmoid_forward")
@rule("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like")
def keeps_shape(call: OpCall) -> ShardDim:
    """Keeps the cut for operators that leave each element at its place, but have no pointwise tag."""
    x, along = call.only()
    if call.outputs and call.outputs[0].shape != x.shape:
        raise NeedsWhole
    call.require_same(call.operands, along, x)
    return along


@rule("new_zeros", "new_ones", "new_full", "new_empty", "new_empty_strided")
def new(call: OpCall) -> ShardDim:
    """Keeps the cut of a tensor for a new one of equal sizes, down to the cut dimension."""
    x, along = call.only()
    out = call.outputs[0]
    if out.dim() != x.dim() or out.shape[: along.dim + 1] != x.shape[: along.dim + 1]:
        raise NeedsWhole
    return along
