"""Learns shapes that follow the batch and the sequence, from two calls with different sizes of both."""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Two (batch, sequence) sizes: a dimension of an output that follows either shows itself by the difference.
SIZES = ((2, 5), (3, 7))


class FollowsNeither(Exception):
    """Reports a dimension that changed, but not as the batch or the sequence did."""


@dataclass(frozen=True)
class Shape:
    """Describes the shape of an output as it follows the batch ``b`` and the sequence ``s``.

    Attributes:
        dims: for each dimension its size, or ``b``, ``s``, ``b*s``, or ``a*s+c`` with numbers for ``a`` and ``c``.
        dtype: dtype in a run in float32.
        fixed: whether floats keep this dtype in a run in another one.
    """

    dims: tuple[int | str, ...]
    dtype: torch.dtype
    fixed: bool = False

    def sizes(self, batch: int, length: int) -> tuple[int, ...]:
        """Returns the shape for a batch of ``batch`` sequences of ``length`` tokens."""
        words = {"b": batch, "s": length, "b*s": batch * length}

        def size(dim: int | str) -> int:
            if isinstance(dim, int):
                return dim
            if dim in words:
                return words[dim]
            factor, _, more = dim.partition("*s+")
            return int(factor) * length + int(more)

        return tuple(map(size, self.dims))

    def run_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Returns the output's dtype in a run whose parameters have ``dtype``."""
        return self.dtype if self.fixed or not self.dtype.is_floating_point else dtype


def shape_of(first: torch.Tensor, second: torch.Tensor, *, second_dtype: torch.dtype = torch.float32) -> Shape:
    """Returns the shape of one tensor seen in two calls, whose batches have the two sizes of ``SIZES``.

    Args:
        second_dtype: dtype of the parameters in the second call; in the first one they were float32.

    Raises:
        FollowsNeither: a dimension follows neither; holds its two sizes.
    """
    dims = tuple(_dim(*sizes) for sizes in zip(first.shape, second.shape, strict=True))
    fixed = first.dtype.is_floating_point and second.dtype == first.dtype and second_dtype != first.dtype
    return Shape(dims, first.dtype, fixed)


def _dim(one: int, two: int) -> int | str:
    (b1, s1), (b2, s2) = SIZES
    words = {(b1, b2): "b", (s1, s2): "s", (b1 * s1, b2 * s2): "b*s"}
    if one == two:
        return one
    if (one, two) in words:
        return words[one, two]
    factor, rest = divmod(two - one, s2 - s1)
    more = one - factor * s1
    if rest or factor < 1 or more < 0:
        raise FollowsNeither(one, two)
    return f"{factor}*s+{more}"
