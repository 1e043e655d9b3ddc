"""Rules of operators that take each element by itself, or make new tensors of a given one's shape."""

from __future__ import annotations

from dataclasses import replace

import torch

from megasched.analysis.rules.op_call import NeedsWhole, OpCall
from megasched.analysis.rules.table import rule
from megasched.language.tensor_types import ShardDim


@rule("copy_")
def pointwise(call: OpCall) -> list[ShardDim]:
    """What torch tags as pointwise: operands are broadcast."""
    return [_broadcast(call, out) for out in call.outputs]


def _broadcast(call: OpCall, out: torch.Tensor) -> ShardDim:
    """Dimensions are aligned at the right; what is whole must be the same for all along the cut one."""
    found = {replace(along, dim=along.dim - tensor.dim() + out.dim()) for tensor, along in call.cut}
    if len(found) > 1:
        raise NeedsWhole
    (along,) = found
    call.require_same(call.operands, along, out)
    return along


@rule("clone", "detach", "alias", "contiguous", "_to_copy", "lift_fresh", "fill", "zero")
@rule("bernoulli", in_place=False)
@rule("native_dropout", "bernoulli_", "uniform_", "normal_", "exponential_", "log_sigmoid_forward")
@rule("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like")
def keeps_shape(call: OpCall) -> ShardDim:
    """What is not tagged as pointwise, and yet leaves each element at its place."""
    x, along = call.only()
    if call.outputs and call.outputs[0].shape != x.shape:
        raise NeedsWhole
    call.require_same(call.operands, along, x)
    return along


@rule("new_zeros", "new_ones", "new_full", "new_empty", "new_empty_strided")
def new(call: OpCall) -> ShardDim:
    """Of sizes that were taken from a tensor that is cut, down to the dimension of the cut."""
    x, along = call.only()
    out = call.outputs[0]
    if out.dim() != x.dim() or out.shape[: along.dim + 1] != x.shape[: along.dim + 1]:
        raise NeedsWhole
    return along
