"""Defines rules for operators that need all of some dimensions, and take the others place by place."""

from __future__ import annotations

from dataclasses import replace

from megasched.analysis.rules.op_call import NeedsWhole, OpCall
from megasched.analysis.rules.table import rule
from megasched.language.tensor_types import ShardDim


@rule("sum", "mean", "prod", "amax", "amin", "max", "min", "argmax", "argmin", "all", "any", "median")
@rule("var", "std", "var_mean", "std_mean", "norm", "linalg_vector_norm", "logsumexp")
@rule("_softmax", "_safe_softmax", "_log_softmax", "cumsum", "cumprod", "sort", "topk", "kthvalue")
@rule("flip", "roll")
def over_dims(call: OpCall) -> ShardDim:
    """Keeps a cut beside the dimensions that the operator works over, which are all where it names none."""
    x, along = call.only()
    dims = call.dims(x)
    if along.dim in dims:
        raise NeedsWhole
    gone = sum(dim < along.dim for dim in dims) if call.outputs[0].dim() < x.dim() else 0
    return replace(along, dim=along.dim - gone)


@rule("glu", "narrow")
def beside_dim(call: OpCall) -> ShardDim:
    """Keeps a cut beside the one dimension that the operator needs whole.

    The halves of ``glu`` meet; the length of ``narrow`` may count a rank's own places or those of the whole.
    """
    x, along = call.only()
    if call.dim(x) == along.dim:
        raise NeedsWhole
    return along


@rule("native_layer_norm", "layer_norm", "rms_norm", "_fused_rms_norm")
def norm(call: OpCall) -> ShardDim:
    """Keeps a cut beside the last dimensions, which the norm is taken over."""
    x, along = call.only()
    if along.dim >= x.dim() - len(call.arguments["normalized_shape"]):
        raise NeedsWhole
    if any(out.dim() != x.dim() for out in call.outputs):
        raise NeedsWhole
    return along


@rule("tril", "triu")
def triangle(call: OpCall) -> ShardDim:
    """Keeps a cut beside the last two dimensions, which hold the triangle."""
    x, along = call.only()
    if along.dim >= x.dim() - 2:
        raise NeedsWhole
    return along
