"""Defines how one parameter of a Megatron module is put together from HF tensors.

A placement says what a rank holds of each HF tensor. A mapping says how these pieces make a parameter that has
another layout than HF's (Megatron's ``linear_qkv`` and ``linear_fc1``). It can be inverted, so that checkpoints
and weights keep HF's names and shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megasched.plan.placement import Placement


@dataclass(frozen=True)
class ParamMapping:
    """Maps one parameter of a rank to its pieces of HF tensors, which lie one after the other along axis 0.

    Attributes:
        parts: placements of the HF tensors, in their order.
        groups: number of groups that each part (each component of a packed one) is cut into; groups of the parts
            alternate: Megatron keeps, for each KV head, the heads of q that use it, then k, then v
            (megatron/core/transformer/attention.py). Counted over all TP ranks; 1: whole parts follow each other.
        paired: blocks of this many rows alternate in the first part, a head's q and its gate; in the parameter
            each group has all q first, then all gates. 0: no pairs.
        entry: the parameter is this entry alone, along axis 0 of the one HF tensor: HF keeps all experts of a
            layer in one tensor, Megatron each in its own. Counted over all ranks.
        transposed: HF keeps the entry, a matrix, as [in, out], Megatron as [out, in].
        interleaved: the two halves of the parameter, gate and up, alternate row by row in the entry.
    """

    parts: tuple[Placement, ...]
    groups: int = 1
    paired: int = 0
    entry: int | None = None
    transposed: bool = False
    interleaved: bool = False

    def __post_init__(self) -> None:
        if self.entry is not None and (len(self.parts) > 1 or self.groups > 1 or self.parts[0].axis != 0):
            raise ValueError(f"{self.name}: only one tensor that is cut along axis 0 has entries")
        if self.entry is None and self.rearranged:
            raise ValueError(f"{self.name}: only an entry is rearranged")
        if self.paired and self.parts[0].shape[0] % (2 * self.paired * self.groups):
            what = f"{list(self.parts[0].shape)} is not made of pairs of {self.paired} in {self.groups} groups"
            raise ValueError(f"{self.parts[0].name}: {what}")
        for part in self.parts if self.groups > 1 else ():
            if any(length % self.groups for length in _components(part)):
                raise ValueError(f"{part.name}: {list(part.shape)} is not made of {self.groups} groups")

    @property
    def rearranged(self) -> bool:
        """Returns whether an entry's layout in HF's tensor differs from that of the parameter."""
        return self.transposed or self.interleaved

    @property
    def name(self) -> str:
        """Returns the joined names of the HF tensors, for messages."""
        return " + ".join(part.name for part in self.parts)

    def cut(self, rank: int, size: int) -> tuple[int, int]:
        """Returns (index, count) of a rank's piece of the parts; an entry counts as a piece by itself."""
        return (rank, size) if self.entry is None else (self.entry, self.parts[0].shape[0])

    def local_shape(self, size: int) -> tuple[int, ...]:
        """Returns the shape on each of ``size`` TP ranks; raises ValueError when a part does not divide."""
        if self.entry is not None:
            shape = self.parts[0].shape[1:]
            return tuple(reversed(shape)) if self.transposed else shape
        shapes = [part.local_shape(size) for part in self.parts]
        if len(shapes) == 1:
            return shapes[0]  # perhaps of no dimension
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])

    def join(self, pieces: Sequence[torch.Tensor], size: int) -> torch.Tensor:
        """Joins a rank's pieces of the parts, as their placements cut them, to its parameter."""
        if self.entry is not None:
            own = pieces[0][0].t() if self.transposed else pieces[0][0]
            return torch.cat([own[::2], own[1::2]]) if self.interleaved else own
        if self.groups == 1 and not self.paired:
            return pieces[0] if len(pieces) == 1 else torch.cat(list(pieces))
        groups = self._local_groups(size)
        rows = [
            component.unflatten(0, (groups, -1))
            for piece, lengths in zip(pieces, self._lengths(size), strict=True)
            for component in piece.split(lengths)  # type: ignore[no-untyped-call]
        ]
        if self.paired:
            rows[0] = rows[0].unflatten(1, (-1, 2, self.paired)).transpose(1, 2).flatten(1, 3)
        return torch.cat(rows, dim=1).flatten(0, 1)

    def split(self, local: torch.Tensor, size: int) -> list[torch.Tensor]:
        """Splits a rank's parameter, or a tensor laid out like it, into pieces of the parts.

        This is the inverse of ``join``; the pieces are views where that is possible.
        """
        if self.entry is not None:
            own = torch.stack(local.chunk(2), dim=1).flatten(0, 1) if self.interleaved else local
            return [(own.t() if self.transposed else own)[None]]
        lengths = self._lengths(size)
        if self.groups == 1 and not self.paired:
            sizes = [sum(of_part) for of_part in lengths]
            return [local] if len(self.parts) == 1 else list(local.split(sizes))  # type: ignore[no-untyped-call]
        groups = self._local_groups(size)
        widths = [length // groups for of_part in lengths for length in of_part]
        rows = list(local.unflatten(0, (groups, -1)).split(widths, dim=1))  # type: ignore[no-untyped-call]
        if self.paired:
            rows[0] = rows[0].unflatten(1, (2, -1, self.paired)).transpose(1, 2).flatten(1, 3)
        left = iter(rows)
        pieces = [[next(left).flatten(0, 1) for _ in of_part] for of_part in lengths]
        return [piece[0] if len(piece) == 1 else torch.cat(piece) for piece in pieces]

    def _lengths(self, size: int) -> list[list[int]]:
        """Returns the lengths of each part's components on one rank."""
        return [
            [length // size for length in part.components] or list(part.local_shape(size)[:1])
            for part in self.parts
        ]

    def _local_groups(self, size: int) -> int:
        if self.groups % size:
            raise ValueError(f"{self.name}: {self.groups} groups do not divide by TP {size}")
        return self.groups // size


def _components(part: Placement) -> tuple[int, ...]:
    return part.components or (part.shape[-1 if part.transposed else 0],)
