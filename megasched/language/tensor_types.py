"""Describes how a tensor is sharded over the ranks of a group, in terms that all analyses share."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto


class TpType(Enum):
    """Says what a tensor is to the ranks of a TP group, in the words of PyTorch's SPMD types.

    Attributes:
        INVARIANT: the same on all ranks, and so is its gradient.
        REPLICATE: the same on all ranks, inside of a TP region: each rank has a term of its gradient.
        FEATURE_SHARD: each rank has a part of the features or heads.
        SEQUENCE_SHARD: each rank has a part of the sequence.
    """

    INVARIANT = auto()
    REPLICATE = auto()
    FEATURE_SHARD = auto()
    SEQUENCE_SHARD = auto()


INVARIANT, REPLICATE, FEATURE_SHARD, SEQUENCE_SHARD = TpType


@dataclass(frozen=True)
class ShardDim:
    """Describes the dimension in which a tensor is sharded.

    Attributes:
        dim: the dimension, counted from the left.
        outer: product of the outer dimensions that a view has merged into this one: its size is ``outer`` times
            the sharded size.
        components: sizes of the packed projections that follow each other in this dimension, each sharded
            separately; empty for a single one.
        heads: for each component, its number of heads if there are more ranks than heads, so that several ranks
            share one; 0 if each rank has its own part. Empty: 0 for all.
    """

    dim: int
    outer: int = 1
    components: tuple[int, ...] = ()
    heads: tuple[int, ...] = ()

    def on_rank(self, size: int, tp: int) -> int:
        """Returns how much of a dimension of this size one of ``tp`` ranks holds."""
        lengths = self.components or (size // self.outer,)
        parts = self.heads or (0,) * len(lengths)
        return self.outer * sum(length // (part or tp) for length, part in zip(lengths, parts, strict=True))


# What ``follow`` says of a component of one head: every rank has all of it.
ON_ALL_RANKS = ShardDim(-1)
