"""Checkpoints keyed by HF names with global shapes, whatever the layout that writes or reads them.

What a parameter's entry is follows from its placement alone, so the optimizer's states follow too: Megatron
builds them from the model's entries.
"""

from __future__ import annotations

from math import gcd
from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ReplicaId, ShardedTensorFactory

from megasched.placement import Placement


class CheckpointMismatch(SystemExit):
    """A checkpoint that does not fit. Not an ``Exception``: Megatron would try again and skip what is missing
    (``load_model_state_dict`` in megatron/training/checkpointing.py)."""


def sharded_entry(
    parameter: torch.Tensor, placement: Placement, rank: int, size: int, dp_rank: int, *, copy: bool = False
) -> ShardedTensor | ShardedTensorFactory:
    """The checkpoint entry of what this rank holds of one HF parameter.

    Args:
        parameter: the local parameter itself; Megatron's optimizers find their states by its identity.
        placement: where it belongs; gives the key.
        rank, size: in the TP group.
        dp_rank: in the data-parallel group (with context parallel ranks).
        copy: it is the copy of a tied parameter that another stage writes.
    """
    replica: ReplicaId = (int(copy), 0 if placement.sharded else rank, dp_rank)
    if not placement.sharded:
        return ShardedTensor.from_rank_offsets(placement.name, parameter, replica_id=replica)
    if len(placement.component_sizes) == 1 and not placement.transposed:
        return ShardedTensor.from_rank_offsets(
            placement.name,
            parameter,
            (placement.axis, rank, size),
            replica_id=replica,
            allow_shape_mismatch=placement.padded is not None,
        )
    return _factory(parameter, placement, rank, size, replica)


def _factory(
    parameter: torch.Tensor, placement: Placement, rank: int, size: int, replica: ReplicaId
) -> ShardedTensorFactory:
    """Packed or transposed: the rank's piece is written as blocks of one size that lie on a regular grid."""
    axis = placement.axis
    assert axis is not None
    pieces = [length // size for length in placement.component_sizes]
    block = gcd(*pieces)
    fragments = sum(placement.component_sizes) // block
    offsets = [
        start // block + i
        for (start, stop) in placement.ranges(rank, size)
        for i in range((stop - start) // block)
    ]

    def build(key: str, local: torch.Tensor, replica_id: ReplicaId, flattened_range: Any) -> list[ShardedTensor]:
        upright = local.t() if placement.transposed else local
        return [
            ShardedTensor.from_rank_offsets(
                key, part.contiguous(), (axis, offset, fragments), replica_id=replica_id
            )
            for part, offset in zip(upright.split(block, dim=axis), offsets, strict=True)
        ]

    def merge(parts: list[torch.Tensor]) -> torch.Tensor:
        whole = torch.cat(parts, dim=axis)
        return whole.t().contiguous() if placement.transposed else whole

    return ShardedTensorFactory(placement.name, parameter, build, merge, replica)


def refuse_mismatch(missing: list[str], unexpected: list[str], shapes: list[str]) -> None:
    """Ends the process when a checkpoint does not fit, with every name.

    Raises:
        CheckpointMismatch: unless all three lists are empty.
    """
    if not (missing or unexpected or shapes):
        return
    lines = ["megasched: the checkpoint does not fit the model"]
    for title, names in (("missing", missing), ("unexpected", unexpected), ("of another shape", shapes)):
        lines += [f"  {title}:"] + [f"    {name}" for name in names] if names else []
    raise CheckpointMismatch("\n".join(lines))
