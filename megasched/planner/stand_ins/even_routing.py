"""Stands in for Megatron's routing to experts where tensors have no values: every expert gets as many tokens.

Megatron's dispatcher reads from a map of tokens and experts how many tokens go where. The stand-ins replace the
functions that read it; they make, keep and send as much as Megatron's own do for an even map.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class EvenCounts:
    """Stands in for a tensor of counts whose values Megatron asks for: ``total`` tokens, even over ``parts``."""

    def __init__(self, total: int, parts: int) -> None:
        self.counts = [(total + part) // parts for part in range(parts)]

    def tolist(self) -> list[int]:
        """Returns the counts, as a tensor does."""
        return self.counts

    def ravel(self) -> EvenCounts:
        """Returns itself, as in whatever order the counts are the same."""
        return self

    @property
    def T(self) -> EvenCounts:
        """Returns itself, for the transpose of a tensor."""
        return self


def preprocess(dispatcher: Any, routing_map: torch.Tensor) -> EvenCounts:
    """Stands in for ``MoEAlltoAllTokenDispatcher.preprocess`` of Megatron's moe/token_dispatcher.py."""
    pairs = routing_map.shape[0] * dispatcher.config.moe_router_topk
    dispatcher.num_out_tokens = pairs
    if dispatcher.ep_size > 1:
        dispatcher.input_splits = dispatcher.output_splits = EvenCounts(pairs, dispatcher.ep_size).counts
    dispatcher.num_global_tokens_per_local_expert = EvenCounts(pairs, dispatcher.num_experts)
    return EvenCounts(pairs, dispatcher.num_local_experts)


def known(dispatcher: Any, point: str, tokens_per_expert: Any = None) -> Any:
    """Stands in for ``MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize``: there is nothing to wait for."""
    return tokens_per_expert


def permute(
    tokens: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor, num_out_tokens: int, **options: Any
) -> Any:
    """Stands in for ``permute`` of megatron/core/transformer/moe/moe_utils.py.

    It takes [t, h] and [t, experts], and gives [pairs, h] and [pairs].
    """
    places = torch.arange(num_out_tokens, device=tokens.device)
    of_tokens = places % tokens.shape[0]
    chosen = probs.T.contiguous().flatten().index_select(0, places)
    return tokens.index_select(0, of_tokens), chosen, of_tokens, None, None


def sort_chunks(
    x: torch.Tensor, sizes: EvenCounts, order: torch.Tensor, probs: torch.Tensor | None = None, **options: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Stands in for ``sort_chunks_by_idxs`` of megatron/core/transformer/moe/moe_utils.py."""
    first = sizes.counts[0]
    turned = torch.cat([x[first:], x[:first]])
    return turned, None if probs is None else torch.cat([probs[first:], probs[:first]])


_DISPATCHER = "megatron.core.transformer.moe.token_dispatcher"
STAND_INS: dict[str, Callable[..., Any]] = {
    f"{_DISPATCHER}:MoEAlltoAllTokenDispatcher.preprocess": preprocess,
    f"{_DISPATCHER}:MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize": known,
    f"{_DISPATCHER}:permute": permute,
    f"{_DISPATCHER}:sort_chunks_by_idxs": sort_chunks,
}
