"""Defines checkpoint entries by HF names and global shapes, whatever the layout that writes or reads them.

A parameter's entry follows from its placement alone, and so do the optimizer's states: Megatron builds them from
the model's entries.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import gcd
from typing import Any, NamedTuple

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ReplicaId, ShardedTensorFactory

from megasched.plan.param_mapping import ParamMapping
from megasched.plan.placement import Placement


class CheckpointMismatch(SystemExit):
    """Ends the process where a checkpoint does not fit the model.

    It is no ``Exception``: Megatron would try again and skip what is missing (``load_model_state_dict`` in
    megatron/training/checkpointing.py).
    """


class ShardOwner(NamedTuple):
    """Tells where a rank stands among those that share a parameter.

    Attributes:
        rank, size: index of the piece that it holds, and number of pieces; entries are counted over all ranks.
        replica: number among the ranks that hold the same piece, in the group that it could be cut over, and by
            data parallelism (context parallel ranks included).
    """

    rank: int
    size: int
    replica: tuple[int, int]


def sharded_entry(
    parameter: torch.Tensor,
    assembly: ParamMapping,
    place: ShardOwner,
    *,
    copy: bool = False,
    vocabulary: Collection[str] = (),
) -> ShardedTensor | ShardedTensorFactory:
    """Returns the checkpoint entry of what this rank holds in one parameter.

    Args:
        parameter: the local parameter itself; Megatron's optimizers find their states by its identity.
        assembly: mapping to the HF tensors that it is made of; gives the keys.
        place: place of this rank.
        copy: whether it is the copy of a tied parameter that another stage writes.
        vocabulary: names of tensors whose rows are a vocabulary, which a checkpoint may have with padding.
    """
    rank, size, replica = place
    parts = [
        _Part(placement, rank, size, (int(copy), *replica), placement.name in vocabulary)
        for placement in assembly.parts
    ]
    if assembly.entry is not None and not assembly.rearranged:
        return parts[0].entry(parts[0].placement.name, parameter)
    if len(parts) == 1 and parts[0].regular and not assembly.rearranged:
        return parts[0].tensor(parts[0].placement.name, parameter)

    def build(key: str, local: torch.Tensor, replica_id: ReplicaId, flattened_range: Any) -> list[ShardedTensor]:
        # An optimizer's states come with a key of their own before the name: "optimizer.state.exp_avg.NAME".
        prefix = key.removesuffix(parts[0].placement.name)
        pieces = assembly.split(local, size)
        if assembly.entry is not None:
            return [parts[0].entry(key, pieces[0][0].contiguous())]
        return [
            tensor
            for part, piece in zip(parts, pieces, strict=True)
            for tensor in part.blocks(prefix + part.placement.name, piece)
        ]

    def merge(loaded: list[torch.Tensor]) -> torch.Tensor:
        if assembly.entry is not None:
            return assembly.join([loaded[0][None]], size).contiguous()
        rest = list(loaded)
        pieces = []
        for part in parts:
            pieces.append(part.whole(rest[: part.count]))
            del rest[: part.count]
        return assembly.join(pieces, size)

    return ShardedTensorFactory(parts[0].placement.name, parameter, build, merge, parts[0].replica)


class _Part:
    """Represents a rank's piece of one HF tensor as entries of a checkpoint.

    Packed and transposed pieces are written in HF's orientation, as blocks of one size on a regular grid. All
    others, and slices of a stacked tensor, are one entry.
    """

    def __init__(
        self, placement: Placement, rank: int, size: int, replica: ReplicaId, of_vocabulary: bool
    ) -> None:
        self.placement, self.rank, self.size, self.replica = placement, rank, size, replica
        self.of_vocabulary = of_vocabulary
        self.regular = not placement.sharded or (len(placement.component_sizes) == 1 and not placement.transposed)
        self.count = 1 if self.regular else len(self._offsets())

    def tensor(self, key: str, local: torch.Tensor) -> ShardedTensor:
        """Returns the one entry of a regular piece."""
        placement = self.placement
        cuts = [(placement.axis, self.rank, self.size)] if placement.sharded else []
        return ShardedTensor.from_rank_offsets(
            key, local, *cuts, replica_id=self.replica, allow_shape_mismatch=self.of_vocabulary
        )

    def entry(self, key: str, local: torch.Tensor) -> ShardedTensor:
        """Returns the one entry of a slice of a stacked tensor, which has an axis less."""
        return ShardedTensor.from_rank_offsets(
            key,
            local,
            (0, self.rank, self.size),
            replica_id=self.replica,
            prepend_axis_num=1,
        )

    def blocks(self, key: str, local: torch.Tensor) -> list[ShardedTensor]:
        """Returns the entries of any piece."""
        if self.regular:
            return [self.tensor(key, local.contiguous())]
        axis, fragments = self.placement.axis, sum(self.placement.component_sizes) // self._block()
        upright = local.t() if self.placement.transposed else local
        return [
            ShardedTensor.from_rank_offsets(
                key, block.contiguous(), (axis, offset, fragments), replica_id=self.replica
            )
            for block, offset in zip(upright.split(self._block(), dim=axis), self._offsets(), strict=True)
        ]

    def whole(self, loaded: list[torch.Tensor]) -> torch.Tensor:
        """Joins the piece from its loaded entries."""
        if self.regular:
            return loaded[0]
        upright = torch.cat(loaded, dim=self.placement.axis)
        return upright.t().contiguous() if self.placement.transposed else upright

    def _block(self) -> int:
        return gcd(*(length // self.size for length in self.placement.component_sizes))

    def _offsets(self) -> list[int]:
        block = self._block()
        ranges = self.placement.ranges(self.rank, self.size)
        return [start // block + i for start, stop in ranges for i in range((stop - start) // block)]


def copy_loaded(loaded: Mapping[str, Any], own: Mapping[str, tuple[torch.Tensor, str]]) -> None:
    """Copies what was loaded into this rank's tensors.

    Args:
        loaded: key -> tensor; extra states of Transformer Engine are ignored.
        own: key -> (the tensor on this rank, its HF name).

    Raises:
        CheckpointMismatch: keys or shapes differ.
    """
    given = {key: value for key, value in loaded.items() if not key.endswith("_extra_state")}
    shapes = [
        f"{own[key][1]}: {list(value.shape)} in the checkpoint, {list(own[key][0].shape)} here"
        for key, value in given.items()
        if key in own and value.shape != own[key][0].shape
    ]
    missing = [own[key][1] for key in own if key not in given]
    _refuse_mismatch(missing, [key for key in given if key not in own], shapes)
    with torch.no_grad():
        for key, (held, _) in own.items():
            held.copy_(given[key])


def _refuse_mismatch(missing: list[str], unexpected: list[str], shapes: list[str]) -> None:
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
