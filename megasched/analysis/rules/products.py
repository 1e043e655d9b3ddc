"""Defines rules for matrix products and convolutions."""

from __future__ import annotations

from dataclasses import replace

import torch

from megasched.analysis.rules.op_call import NeedsWhole, OpCall
from megasched.analysis.rules.table import rule
from megasched.language.tensor_types import ShardDim


@rule("mm", "bmm", "matmul")
def product(call: OpCall) -> ShardDim:
    """Follows the cut through the product of two matrices, or of two batches of matrices."""
    return _product(call, *call.operands)


@rule("addmm", "baddbmm", in_place=False)
def product_and_sum(call: OpCall) -> ShardDim:
    """Follows the cut through a product and a sum with a tensor that is cut like it, or constant along the cut."""
    added, *factors = call.operands
    along, out = _product(call, *factors), call.outputs[0]
    own = call.along(added)
    if own is None:
        call.require_same([added], along, out)
    elif replace(own, dim=own.dim - added.dim() + out.dim()) != along:
        raise NeedsWhole
    return along


def _product(call: OpCall, a: torch.Tensor, b: torch.Tensor) -> ShardDim:
    left, right, out = call.along(a), call.along(b), call.outputs[0]
    if (left is not None and left.dim == a.dim() - 1) or (right is not None and right.dim == b.dim() - 2):
        raise NeedsWhole  # each rank would have a part of the sum
    found = {along for along in (left, right) if along is not None}
    if len(found) != 1 or not a.dim() == b.dim() == out.dim():
        raise NeedsWhole
    (along,) = found
    if along.dim < out.dim() - 2:  # of the batch, which both have
        call.require_same((a, b), along, out)
    return along


@rule("convolution")
def convolution(call: OpCall) -> ShardDim:
    """Keeps a cut along samples, or along a spatial dimension where the kernel has one place.

    A cut of channels would meet whole weights.
    """
    _, along = call.only()
    if along.dim > 0:
        told = call.arguments
        alone = {"stride": 1, "padding": 0, "output_padding": 0}
        by_itself = all(set(told[name]) == {value} for name, value in alone.items())
        if along.dim == 1 or told["weight"].shape[along.dim] != 1 or not by_itself:
            raise NeedsWhole
    return along
