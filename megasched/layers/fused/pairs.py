"""Maps tokens to pairs of a token and one of its experts, and pairs to tokens; each is the other's gradient.

Indexing's own gradient adds rows up where others may add to the same, for which it sorts the indices.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from megasched.layers.fused.kernels import one_kernel


class Pairs(NamedTuple):
    """Tells which pairs there are, in some order; a token's may be missing.

    Attributes:
        rows: [pairs], the token of each.
        places: [t, k], where each token's are in that order; beyond all of them for one that is missing.
    """

    rows: torch.Tensor
    places: torch.Tensor

    def spread(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns each pair's token, [pairs, h], of tokens [t, h]."""
        return _Spread.apply(hidden, *self)

    def collect(self, results: torch.Tensor) -> torch.Tensor:
        """Returns the sums [t, h] of each token's pairs, of [pairs, h]."""
        return _Collect.apply(results, *self)


def by_expert(index: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sorts pairs by their expert; those of one stay in the order of tokens, those of none come last.

    CUDA's sort makes a pass for each 8 bits of a key, so that keys are as small as can be.

    Args:
        index: [t, k], the experts of each token; numbers from ``experts`` on are none.

    Returns:
        the sorted experts, and where each of them was in the flattened ``index``, both [t * k].
    """
    keys = one_kernel(_small_keys)(index.flatten(), experts)
    return keys.sort(stable=True)


def _small_keys(index: torch.Tensor, experts: int) -> torch.Tensor:
    dtypes = (torch.uint8, torch.int16, torch.int32)
    dtype = next((dtype for dtype in dtypes if experts <= torch.iinfo(dtype).max), torch.int64)
    return index.clamp(max=experts).to(dtype)


def in_order(order: torch.Tensor, like: torch.Tensor, count: int) -> Pairs:
    """Returns the first ``count`` pairs of an order of the flattened ``like`` [t, k]."""
    places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    if count < len(order):
        order, places = order[:count], places.clamp(max=count)
    return Pairs(order // like.shape[-1], places.view_as(like))


def sum_rows(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Returns the sums [t, h] of the rows of ``x`` [pairs, h] at ``places`` [t, k]."""
    return one_kernel(_sum_rows)(x, places)


def _sum_rows(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    return x[places].sum(dim=1)


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rows, places)
        return hidden.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _Collect.apply(gradient, *ctx.saved_tensors), None, None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, results: torch.Tensor, rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rows, places)
        if len(rows) < places.numel():
            results = F.pad(results, (0, 0, 0, 1))  # what a missing pair adds
        return sum_rows(results, places)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _Spread.apply(gradient, *ctx.saved_tensors), None, None
