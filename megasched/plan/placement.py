"""Defines how one parameter lies over the ranks that share it, for lowering, weights and checkpoints alike.

A placement describes the *HF* tensor: its name, its global shape, the axis that is cut. The shard of a rank
follows by arithmetic alone; no other code decides it again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

import torch

from megasched.language.parallel_dims import Group

TpGradient = Literal["complete", "partial"]


@dataclass(frozen=True)
class Placement:
    """Describes how one HF parameter lies over the group of ranks that share it.

    ``rank`` and ``size`` are everywhere those in ``group``.

    Attributes:
        name: HF name, e.g. ``model.layers.0.mlp.up_proj.weight``; the key in checkpoints.
        shape: global HF shape, without padding.
        axis: axis of the HF tensor that is cut over ``group``; None when every rank holds all of it.
        components: sizes along ``axis`` of the projections packed into the tensor, e.g. ``(q, k, v)``;
            each is cut on its own and the rank holds the pieces side by side. Empty: one component.
        padded: size of ``axis`` after padding with zero rows (a vocabulary); None without padding.
        transposed: the rank holds its piece transposed (HF ``Conv1D`` keeps [in, out], Megatron [out, in]).
        tp_gradient: ``partial`` when each TP rank computes a part of the gradient of a replicated
            parameter, so that the parts must be summed; ``complete`` otherwise.
        group: ``tp``, or ``ep`` for a tensor whose axis counts experts.
    """

    name: str
    shape: tuple[int, ...]
    axis: int | None = None
    components: tuple[int, ...] = ()
    padded: int | None = None
    transposed: bool = False
    tp_gradient: TpGradient = "complete"
    group: Group = "tp"

    def __post_init__(self) -> None:
        if self.axis is not None and not 0 <= self.axis < len(self.shape):
            raise ValueError(f"{self.name}: no axis {self.axis} in shape {list(self.shape)}")
        if self.components and (self.axis is None or sum(self.components) != self.shape[self.axis]):
            raise ValueError(f"{self.name}: components {self.components} do not add up to {list(self.shape)}")
        if self.padded is not None and (self.axis is None or self.padded < self.shape[self.axis]):
            raise ValueError(f"{self.name}: padded size {self.padded} is below {list(self.shape)}")
        if self.padded is not None and len(self.components) > 1:
            raise ValueError(f"{self.name}: packed projections can't be padded")
        if self.transposed and len(self.shape) > 2:
            raise ValueError(f"{self.name}: only a matrix can be transposed, not {list(self.shape)}")
        if self.group == "ep" and (self.axis is None or self.tp_gradient == "partial"):
            raise ValueError(f"{self.name}: what is not cut by experts is no matter of EP")

    @property
    def sharded(self) -> bool:
        return self.axis is not None

    @property
    def component_sizes(self) -> tuple[int, ...]:
        """Returns the sizes along ``axis`` that are cut one by one, padding included."""
        assert self.axis is not None
        return self.components or (self.padded or self.shape[self.axis],)

    def ranges(self, rank: int, size: int) -> list[tuple[int, int]]:
        """Returns the half-open ranges along ``axis`` of the global (unpadded) tensor that rank ``rank`` holds.

        There is one range for each component; one that lies in the padding alone is empty (start == stop). Raises
        ValueError when the axis does not divide by ``size``, or there is no such rank.
        """
        assert self.axis is not None
        if not 0 <= rank < size:
            raise ValueError(f"{self.name}: no rank {rank} in {self.group.upper()} {size}")
        limit = self.shape[self.axis]
        starts = [0, *accumulate(self.component_sizes)]
        found = []
        for start, piece in zip(starts, self._piece_sizes(size), strict=False):
            begin = start + rank * piece
            found.append((min(begin, limit), min(begin + piece, limit)))
        return found

    def _piece_sizes(self, size: int) -> list[int]:
        """Returns the length of each component along ``axis`` on one of ``size`` ranks."""
        for length in self.component_sizes:
            if length % size:
                where = f"{length} along axis {self.axis}"
                raise ValueError(f"{self.name}: {where} does not divide by {self.group.upper()} {size}")
        return [length // size for length in self.component_sizes]

    def local_shape(self, size: int) -> tuple[int, ...]:
        """Returns the shape on each of ``size`` ranks; raises ValueError when the axis does not divide."""
        shape = list(self.shape)
        if self.axis is not None:
            shape[self.axis] = sum(self._piece_sizes(size))
        return tuple(reversed(shape)) if self.transposed else tuple(shape)

    def assemble(self, pieces: Sequence[torch.Tensor], size: int) -> torch.Tensor:
        """Joins the pieces that ``ranges`` named, in HF's orientation, into the tensor that a rank holds."""
        whole = pieces[0] if len(pieces) == 1 else torch.cat(list(pieces), dim=self.axis or 0)
        if self.padded is not None:
            assert self.axis is not None
            missing = self.padded // size - whole.shape[self.axis]
            if missing:
                filler = list(whole.shape)
                filler[self.axis] = missing
                whole = torch.cat([whole, whole.new_zeros(filler)], dim=self.axis)
        return whole.t() if self.transposed else whole

    def shard(self, full: torch.Tensor, rank: int, size: int) -> torch.Tensor:
        """Returns the shard of the full HF tensor that rank ``rank`` of ``size`` holds (a view where possible)."""
        if tuple(full.shape) != self.shape:
            raise ValueError(f"{self.name}: got shape {list(full.shape)}, expected {list(self.shape)}")
        if self.axis is None:
            return full.t() if self.transposed else full
        cuts = [full.narrow(self.axis, start, stop - start) for start, stop in self.ranges(rank, size)]
        return self.assemble(cuts, size)

    def unshard(self, local: Sequence[torch.Tensor]) -> torch.Tensor:
        """Returns the full HF tensor from the shards of all ranks (padding dropped); the inverse of ``shard``."""
        size = len(local)
        upright = [piece.t() if self.transposed else piece for piece in local]
        if self.axis is None:
            return upright[0]
        lengths = self._piece_sizes(size)
        split = [piece.split(lengths, dim=self.axis) for piece in upright]  # type: ignore[no-untyped-call]
        full = torch.cat([split[rank][i] for i in range(len(lengths)) for rank in range(size)], dim=self.axis)
        return full.narrow(self.axis, 0, self.shape[self.axis])


@dataclass(frozen=True)
class ReplicatedHeads:
    """Tells which output rows of a projection a rank uses where TP exceeds the number of KV heads.

    The projection stays whole, and each rank computes the head that its query heads attend to, so the gradient of
    the whole is the sum over TP (the placement says ``partial``). Megatron's rule for ``num_query_groups < TP``
    assigns heads to ranks in the same way (megatron/core/transformer/attention.py).

    Attributes:
        heads: number of heads of k, and of v.
        components: sizes of q, k and v where they are packed into one projection; empty for k or v alone.
    """

    heads: int
    components: tuple[int, ...] = ()

    @property
    def of_components(self) -> tuple[int, ...]:
        """Returns the number of replicated heads in each component; 0 for q, which is cut between the ranks."""
        return (0, self.heads, self.heads) if self.components else (self.heads,)

    def rows(self, rank: int, size: int, features: int) -> list[tuple[int, int]]:
        """Returns the half-open ranges of output rows of a TP rank: its part of q, one head each of k and v.

        Args:
            features: output rows of the whole projection.
        """
        sizes = self.components or (features,)
        starts = [0, *accumulate(sizes)]
        found = []
        for index, (start, length) in enumerate(zip(starts, sizes, strict=False)):
            queries = bool(self.components) and index == 0
            width = length // size if queries else length // self.heads
            place = rank if queries else rank * self.heads // size
            found.append((start + place * width, start + (place + 1) * width))
        return found
