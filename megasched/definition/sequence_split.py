"""How Megatron splits a sequence under context parallelism: two pieces a rank, one from each end.

The sequence is cut into ``2 * size`` equal pieces; rank ``r`` has piece ``r`` and piece ``2 * size - 1 - r``, so
that causal attention is the same work for all (``get_batch_on_this_cp_rank`` in megatron/core/utils.py). Nothing
here imports Megatron: a plan is made without it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megasched.language.tensor_types import ShardDim


@dataclass(frozen=True)
class Zigzag:
    """One rank's place in the split.

    Attributes:
        size: ranks that share a sequence.
        rank: among them.
    """

    size: int
    rank: int

    @property
    def pieces(self) -> tuple[int, int]:
        """Which pieces of the sequence are this rank's, in the order in which it has them."""
        return self.rank, 2 * self.size - 1 - self.rank

    def positions(self, length: int, device: torch.device) -> torch.Tensor:
        """Places [length] in the whole sequence of the ``length`` tokens of this rank, int64."""
        piece = length // 2
        return torch.cat([torch.arange(p * piece, (p + 1) * piece, device=device) for p in self.pieces])

    def local_sequence(self, whole: torch.Tensor, along: ShardDim) -> torch.Tensor:
        """What this rank has of a tensor that is whole along the sequence."""
        x = _unmerge(whole, along)
        dim = along.dim + (along.outer > 1)
        pieces = x.chunk(2 * self.size, dim)
        own = torch.cat([pieces[index] for index in self.pieces], dim)
        return _merge(own, along)

    def in_order(self, gathered: torch.Tensor) -> torch.Tensor:
        """The sequence along dimension 0, of what the ranks have one after the other."""
        pieces = gathered.chunk(2 * self.size, 0)
        held = [piece for rank in range(self.size) for piece in Zigzag(self.size, rank).pieces]
        return torch.cat([pieces[held.index(index)] for index in range(2 * self.size)])

    def sequence_first(self, part: torch.Tensor, along: ShardDim) -> torch.Tensor:
        """A tensor with its sequence as dimension 0, contiguous."""
        dim = along.dim + (along.outer > 1)
        return _unmerge(part, along).movedim(dim, 0).contiguous()

    def sequence_back(self, whole: torch.Tensor, along: ShardDim) -> torch.Tensor:
        """The opposite of ``sequence_first``."""
        dim = along.dim + (along.outer > 1)
        return _merge(whole.movedim(0, dim), along).contiguous()


def causal_mask(places: torch.Tensor, length: int, window: int | None = None) -> torch.Tensor:
    """[len(places), length], True where a query at one of these places attends to a key.

    Args:
        window: how many keys it attends to, its own included; None for all before it.
    """
    behind = places[:, None] - torch.arange(length, device=places.device)
    return behind >= 0 if window is None else (behind >= 0) & (behind < window)


def _unmerge(x: torch.Tensor, along: ShardDim) -> torch.Tensor:
    """Splits off what a view has merged with the sequence: [b * s, h] -> [b, s, h]."""
    return x.unflatten(along.dim, (along.outer, -1)) if along.outer > 1 else x


def _merge(x: torch.Tensor, along: ShardDim) -> torch.Tensor:
    return x.flatten(along.dim, along.dim + 1) if along.outer > 1 else x
