"""Splits sequences as Megatron does under context parallelism: two pieces per rank, one from each end.

The sequence is cut into ``2 * size`` equal pieces; rank ``r`` has pieces ``r`` and ``2 * size - 1 - r``, so that
causal attention costs all ranks the same (``get_batch_on_this_cp_rank`` in megatron/core/utils.py). This module
does not import Megatron: a plan is made without it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megasched.language.tensor_types import ShardDim


@dataclass(frozen=True)
class Zigzag:
    """Represents one rank's position in the split.

    Attributes:
        size: ranks that share a sequence.
        rank: number of this rank among them.
    """

    size: int
    rank: int

    @property
    def pieces(self) -> tuple[int, int]:
        """Returns the numbers of this rank's two pieces of the sequence, in the order of its part."""
        return self.rank, 2 * self.size - 1 - self.rank

    def positions(self, length: int, device: torch.device) -> torch.Tensor:
        """Returns the positions [length] in the whole sequence of this rank's ``length`` tokens, int64."""
        piece = length // 2
        return torch.cat([torch.arange(p * piece, (p + 1) * piece, device=device) for p in self.pieces])

    def local_sequence(self, whole: torch.Tensor, along: ShardDim) -> torch.Tensor:
        """Returns this rank's part of a tensor that holds the whole sequence."""
        x = _unmerge(whole, along)
        dim = along.dim + (along.outer > 1)
        pieces = x.chunk(2 * self.size, dim)
        own = torch.cat([pieces[index] for index in self.pieces], dim)
        return _merge(own, along)

    def in_order(self, gathered: torch.Tensor) -> torch.Tensor:
        """Returns the whole sequence in order along dimension 0, from the concatenated parts of all ranks."""
        pieces = gathered.chunk(2 * self.size, 0)
        held = [piece for rank in range(self.size) for piece in Zigzag(self.size, rank).pieces]
        return torch.cat([pieces[held.index(index)] for index in range(2 * self.size)])

    def sequence_first(self, part: torch.Tensor, along: ShardDim) -> torch.Tensor:
        """Returns a contiguous tensor with the sequence as dimension 0."""
        dim = along.dim + (along.outer > 1)
        return _unmerge(part, along).movedim(dim, 0).contiguous()

    def sequence_back(self, whole: torch.Tensor, along: ShardDim) -> torch.Tensor:
        """Undoes ``sequence_first``."""
        dim = along.dim + (along.outer > 1)
        return _merge(whole.movedim(0, dim), along).contiguous()


def causal_mask(places: torch.Tensor, length: int, window: int | None = None) -> torch.Tensor:
    """Returns a mask [len(places), length]: True where the query at a position attends to a key.

    Args:
        places: positions of the queries in the whole sequence.
        window: how many keys a query attends to, its own included; None for all before it.
    """
    behind = places[:, None] - torch.arange(length, device=places.device)
    return behind >= 0 if window is None else (behind >= 0) & (behind < window)


def _unmerge(x: torch.Tensor, along: ShardDim) -> torch.Tensor:
    """Splits off the dimensions that a view has merged with the sequence: [b * s, h] -> [b, s, h]."""
    return x.unflatten(along.dim, (along.outer, -1)) if along.outer > 1 else x


def _merge(x: torch.Tensor, along: ShardDim) -> torch.Tensor:
    return x.flatten(along.dim, along.dim + 1) if along.outer > 1 else x
