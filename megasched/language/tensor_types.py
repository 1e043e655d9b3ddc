"""How a tensor of a run may lie over the ranks of a group, in words that all analyses share."""

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
    """How a tensor is cut.

    Attributes:
        dim: the dimension, counted from the left.
        outer: what lies outside the cut in this dimension, where a view has merged it with others: the
            dimension is ``outer`` times what is cut.
        components: sizes of the packed projections that lie one after the other there, each cut on its own;
            empty for one.
        heads: of each component, where it has fewer than there are ranks, so that several have the same one; 0
            where each rank has a part of its own. Empty where that holds for all.
    """

    dim: int
    outer: int = 1
    components: tuple[int, ...] = ()
    heads: tuple[int, ...] = ()

    def on_rank(self, size: int, tp: int) -> int:
        """How much of a dimension of this size one of ``tp`` ranks has."""
        lengths = self.components or (size // self.outer,)
        parts = self.heads or (0,) * len(lengths)
        return self.outer * sum(length // (part or tp) for length, part in zip(lengths, parts, strict=True))


# What ``follow`` says of a component of one head: every rank has all of it.
ON_ALL_RANKS = ShardDim(-1)
