"""Megatron's mixture of experts where tensors have no values: every expert gets as many tokens.

Megatron's dispatcher reads from a map of tokens and experts how many tokens go where. These take the places of
what reads them; what is made, kept and sent is as much as Megatron's own makes of an even map.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class EvenCounts:
    """Tokens of each of ``parts``, in all ``total``; for tensors of counts, of which Megatron asks the values."""

    def __init__(self, total: int, parts: int) -> None:
        self.counts = [(total + part) // parts for part in range(parts)]

    def tolist(self) -> list[int]:
        """As of a tensor."""
        return self.counts

    def ravel(self) -> EvenCounts:
        """As of a tensor; in whatever order, they are the same."""
        return self

    @property
    def T(self) -> EvenCounts:
        """As of a tensor."""
        return self


def preprocess(dispatcher: Any, routing_map: torch.Tensor) -> EvenCounts:
    """For ``MoEAlltoAllTokenDispatcher.preprocess`` of megatron/core/transformer/moe/token_dispatcher.py."""
    pairs = routing_map.shape[0] * dispatcher.config.moe_router_topk
    dispatcher.num_out_tokens = pairs
    if dispatcher.ep_size > 1:
        dispatcher.input_splits = dispatcher.output_splits = EvenCounts(pairs, dispatcher.ep_size).counts
    dispatcher.num_global_tokens_per_local_expert = EvenCounts(pairs, dispatcher.num_experts)
    return EvenCounts(pairs, dispatcher.num_local_experts)


def known(dispatcher: Any, point: str, tokens_per_expert: Any = None) -> Any:
    """For ``MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize``: there is nothing to wait for."""
    return tokens_per_expert


def permute(
    tokens: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor, num_out_tokens: int, **options: Any
) -> Any:
    """For ``permute`` of megatron/core/transformer/moe/moe_utils.py: [t, h] and [t, experts] -> [pairs, h] and
    [pairs]."""
    places = torch.arange(num_out_tokens, device=tokens.device)
    of_tokens = places % tokens.shape[0]
    chosen = probs.T.contiguous().flatten().index_select(0, places)
    return tokens.index_select(0, of_tokens), chosen, of_tokens, None, None


def sort_chunks(
    x: torch.Tensor, sizes: EvenCounts, order: torch.Tensor, probs: torch.Tensor | None = None, **options: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """For ``sort_chunks_by_idxs`` of the same file."""
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
