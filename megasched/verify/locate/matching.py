"""Decides whether the tensors of a TP group are a given tensor: whole on each rank, cut in parts, or summed up.

Where they are not, it says how they relate to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from megasched.verify.reference import relative

_EXACT = 1e-3  # of what was off, is explained by a relation
_MOST_BLOCKS = 64


@dataclass(frozen=True)
class Match:
    """Describes the way in which the ranks' parts come nearest to a tensor.

    Attributes:
        way: ``whole``, ``cut`` or ``summed``.
        dim: dimension along which it is cut.
        errors: error of each rank, or one where they have one tensor together, relative to the largest value.
    """

    way: str
    errors: tuple[float, ...]
    dim: int | None = None

    @property
    def error(self) -> float:
        return max(self.errors)


def match(
    parts: Sequence[torch.Tensor],
    expected: torch.Tensor,
    *,
    components: Sequence[int] = (),
    sums: bool = False,
    floor: float = 0.0,
) -> Match | None:
    """Returns the way in which the parts come nearest to a tensor; None where the shapes allow none.

    Args:
        parts: tensors of the ranks, in rank order.
        components: sizes along the last dimension that are cut one by one.
        sums: whether the ranks may each have a part of a sum.
        floor: smallest value that errors are relative to.
    """
    found = []
    if all(part.shape == expected.shape for part in parts):
        found.append(Match("whole", tuple(relative(part, expected, floor) for part in parts)))
        if sums and len(parts) > 1:
            total = torch.stack(list(parts)).sum(0)
            found.append(Match("summed", (relative(total, expected, floor),)))
    for dim in range(expected.dim()):
        joined = join(parts, expected.shape, dim, components if dim == expected.dim() - 1 else ())
        if joined is not None:
            found.append(Match("cut", (relative(joined, expected, floor),), dim))
    return min(found, key=lambda one: one.error) if found else None


def join(
    parts: Sequence[torch.Tensor], shape: Sequence[int], dim: int, components: Sequence[int] = ()
) -> torch.Tensor | None:
    """Joins parts to the tensor of this shape that was cut along a dimension; None where it was not."""
    size = len(parts)
    wanted = [length // size if place == dim else length for place, length in enumerate(shape)]
    if size == 1 or shape[dim] % size or any(list(part.shape) != wanted for part in parts):
        return None
    sizes = list(components) or [shape[dim]]
    if sum(sizes) != shape[dim] or any(length % size for length in sizes):
        return None
    pieces = [part.split([length // size for length in sizes], dim) for part in parts]
    return torch.cat([pieces[rank][index] for index in range(len(sizes)) for rank in range(size)], dim)


def relation(parts: Sequence[torch.Tensor], expected: torch.Tensor, components: Sequence[int] = ()) -> str:
    """Returns how wrong parts relate to the right tensor, in words; empty where no simple relation holds."""
    whole = all(part.shape == expected.shape for part in parts)
    if whole and len(parts) > 1 and relative(torch.stack(list(parts)).sum(0), expected) < _EXACT:
        return SUMMED
    got = together(parts, expected, components)
    if got is None:
        return ""
    if whole and any(relative(part, got) > _EXACT for part in parts[1:]):
        return DISAGREE
    for name, dtype in (("bfloat16", torch.bfloat16), ("float16", torch.float16)):
        if relative(expected.to(dtype).to(expected.dtype), got) < 1e-6:
            return ROUNDED.format(name)
    factor = float((got * expected).sum() / expected.square().sum().clamp_min(1e-30))
    if relative(got, factor * expected) < _EXACT:
        return FACTOR.format(factor)
    off = (got - expected).flatten(0, -2)
    if off.dim() == 2 and len(off) > 1 and relative(off, off.mean(0, keepdim=True).expand_as(off)) < _EXACT:
        return SAME_VECTOR
    return _reordered(got, expected)


SUMMED = "each TP rank has a part, and the parts add up to the right value"
COPIES = "each copy of the tied tensor has a part, and the parts add up to the right value"
DISAGREE = "the TP ranks have different values where all must have the same"
ROUNDED = "it is the right value, rounded to {}"
FACTOR = "it is {:.4g} times the right value"
SAME_VECTOR = "it is off by the same vector at every token"
REORDERED = "it has the right blocks of {} along dimension {}, in another order"


def together(
    parts: Sequence[torch.Tensor], expected: torch.Tensor, components: Sequence[int] = ()
) -> torch.Tensor | None:
    """Returns the first part where all are whole, or the parts joined; None where their shapes allow neither."""
    if all(part.shape == expected.shape for part in parts):
        return parts[0]
    last = expected.dim() - 1
    for dim in (last, *range(last)):
        joined = join(parts, expected.shape, dim, components if dim == last else ())
        if joined is not None:
            return joined
    return None


def _reordered(got: torch.Tensor, expected: torch.Tensor) -> str:
    """Tells the largest blocks of equal size that have the right norms in another order; empty if none do."""
    for dim in reversed(range(1, expected.dim())):
        length = expected.shape[dim]
        for count in range(2, min(length, _MOST_BLOCKS) + 1):
            if length % count:
                continue
            ours, theirs = (_norms(tensor, dim, count) for tensor in (got, expected))
            apart = all(b - a > 1e-4 * b for a, b in pairwise(theirs.sort().values.tolist()))
            if apart and relative(ours.sort().values, theirs.sort().values) < 1e-5:
                return REORDERED.format(length // count, dim)
    return ""


def _norms(tensor: torch.Tensor, dim: int, count: int) -> torch.Tensor:
    """Returns the norm of each of ``count`` blocks along a dimension."""
    return torch.stack([block.double().norm() for block in tensor.chunk(count, dim)])
