"""Defines rules for operators on images [..., channels, places...], which take each channel by itself."""

from __future__ import annotations

from megasched.analysis.rules.op_call import NeedsWhole, OpCall
from megasched.analysis.rules.table import rule
from megasched.language.tensor_types import ShardDim


def _by_channel(call: OpCall, spatial: int) -> ShardDim:
    """Keeps a cut beside the last dimensions, along which the operator takes neighbours."""
    x, along = call.only()
    if along.dim >= x.dim() - spatial:
        raise NeedsWhole
    return along


@rule("reflection_pad1d", "replication_pad1d", in_place=False)
@rule("upsample_nearest1d", "_upsample_nearest_exact1d", "upsample_linear1d", in_place=False)
def along_a_line(call: OpCall) -> ShardDim:
    """Keeps a cut of samples or channels through padding and interpolation along one dimension."""
    return _by_channel(call, 1)


@rule("avg_pool2d", "max_pool2d_with_indices", "_adaptive_avg_pool2d", "adaptive_max_pool2d", in_place=False)
@rule("reflection_pad2d", "replication_pad2d", in_place=False)
@rule("upsample_nearest2d", "_upsample_nearest_exact2d", "upsample_bilinear2d", in_place=False)
@rule("upsample_bicubic2d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa", in_place=False)
def over_an_area(call: OpCall) -> ShardDim:
    """Keeps a cut of samples or channels through pools, padding and interpolation over two dimensions."""
    return _by_channel(call, 2)


@rule("avg_pool3d", "max_pool3d_with_indices", "_adaptive_avg_pool3d", "adaptive_max_pool3d", in_place=False)
@rule("reflection_pad3d", "replication_pad3d", in_place=False)
@rule("upsample_nearest3d", "_upsample_nearest_exact3d", "upsample_trilinear3d", in_place=False)
def over_a_volume(call: OpCall) -> ShardDim:
    """Keeps a cut of samples or channels through pools, padding and interpolation over three dimensions."""
    return _by_channel(call, 3)


@rule("native_batch_norm", in_place=False)
def batch_norm(call: OpCall) -> list[ShardDim]:
    """Keeps a cut of channels, each of which has its own statistics; weights and running ones are cut alike.

    A module with whole weights is cut with what it takes (``analysis/tp/channels.py``).
    """
    x, *of_channels = call.operands
    along = call.along(x)
    if along is None or along.dim != 1 or along.outer != 1:
        raise NeedsWhole
    own = ShardDim(0, components=along.components, heads=along.heads)
    if any(call.along(tensor) != own for tensor in of_channels):
        raise NeedsWhole
    # Without training the statistics of the batch are returned empty.
    return [along, *(own if out.numel() else ShardDim(0) for out in call.outputs[1:])]
