"""Defines the attention core of Megatron's own layer without Transformer Engine."""

from __future__ import annotations

from contextlib import nullcontext
from functools import lru_cache
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from megasched.definition.sequence_split import causal_mask
from megasched.layers.context_parallel import CpGroup
from megasched.layers.packed import packed_mask
from megasched.layers.rng import fork_rng
from megasched.layers.torch_attention import fused_attention, plain_attention


class CoreAttention(nn.Module):
    """Computes causal attention, optionally in a window, by torch's fused kernel.

    Megatron's own core without Transformer Engine keeps a [b, heads, s, s] tensor; so does this one with sinks.

    Args:
        device: of the sinks, [heads / tp], which exist if the config's softmax is learnable.
    """

    def __init__(
        self,
        config: TransformerConfig,
        softmax_scale: float | None = None,
        *,
        ranks: CpGroup | None,
        device: torch.device,
        pg_collection: ProcessGroupCollection,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        self.ranks = ranks
        self.softmax_offset: nn.Parameter | None = None
        if config.softmax_type == "learnable":
            heads = config.num_attention_heads // pg_collection.tp.size()
            self.softmax_offset = nn.Parameter(torch.empty(heads, dtype=config.params_dtype, device=device))
        self.dropout, self.scale = config.attention_dropout, softmax_scale
        self.window = None if config.window_size is None else config.window_size[0] + 1

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *args: Any,
        packed_seq_params: PackedSeqParams | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Maps q, k and v [s, b, heads, d], which may be grouped, to [s, b, heads * d]; packed ones have no b."""
        if packed_seq_params is not None:
            query, key, value = (tensor[:, None] for tensor in (query, key, value))
        q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        dropout = self.dropout if self.training else 0.0
        mask: torch.Tensor | None
        if packed_seq_params is not None:
            mask = packed_mask(packed_seq_params.cu_seqlens_q, 1, q.shape[2], self.window)
        elif self.ranks is None:
            mask = None if self.window is None else window_mask(self.window, q.shape[2], q.device)
        else:
            k, v = self.ranks.gather_together(k, v)
            places = self.ranks.zigzag.positions(q.shape[2], q.device)
            mask = causal_mask(places, k.shape[2], self.window)
        with fork_rng() if dropout else nullcontext():  # each TP rank has heads of its own
            if self.softmax_offset is None:
                output = fused_attention(q, k, v, mask, mask is None, dropout, self.scale)
            else:
                output = plain_attention(
                    q, k, v, mask, mask is None, dropout, self.scale, sinks=self.softmax_offset
                )
        output = output.permute(2, 0, 1, 3).flatten(2)
        return output if packed_seq_params is None else output[:, 0]


@lru_cache(maxsize=2)
def window_mask(window: int, length: int, device: torch.device) -> torch.Tensor | None:
    """Returns a mask [s, s], True for a token and the ``window - 1`` before it; None if the window covers all."""
    if window >= length:
        return None
    everywhere = torch.ones(length, length, dtype=torch.bool, device=device)
    return everywhere.tril() & ~everywhere.tril(-window)
