"""Computes attention by torch: its fused kernel, or spelled out where that has no place for a term."""

from __future__ import annotations

import torch
from torch.nn import functional as F


def fused_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    dropout: float,
    scaling: float | None,
) -> torch.Tensor:
    """Runs torch's kernel on [b, heads, s, d] tensors; k and v may have fewer heads, in groups."""
    grouped = key.shape[1] != query.shape[1]
    if grouped and (mask is not None or key.shape[-1] != value.shape[-1]):
        # torch's kernels take grouped heads only without a mask; with one they fall back to plain math.
        key, value = (_repeat_heads(t, query.shape[1]) for t in (key, value))
        grouped = False
    return F.scaled_dot_product_attention(
        query, key, value, mask, dropout, is_causal=causal, scale=scaling, enable_gqa=grouped
    )


def plain_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    dropout: float,
    scaling: float | None,
    *,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes attention that no fused kernel of torch supports.

    It has soft-capped logits (Gemma 2), sinks (gpt-oss) or position bias (T5).
    """
    key, value = (_repeat_heads(t, query.shape[1]) for t in (key, value))
    logits = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if position_bias is not None:
        logits = logits + position_bias
    if causal:
        size = (query.shape[2], key.shape[2])
        mask = torch.ones(size, dtype=torch.bool, device=query.device).tril()
    if mask is not None:
        # Not -inf: a padding query attends to nothing, and its NaN would reach every other by 0 * NaN.
        lowest = max(torch.finfo(logits.dtype).min, torch.finfo(torch.float32).min)
        logits = logits.masked_fill(~mask, lowest) if mask.dtype == torch.bool else logits + mask
    if sinks is not None:
        of_heads = sinks.view(1, -1, 1, 1) if sinks.dim() == 1 else sinks
        of_queries = of_heads.expand(query.shape[0], -1, query.shape[2], -1)
        logits = torch.cat([logits, of_queries], dim=-1)
    weights = torch.softmax(logits, dim=-1, dtype=torch.float32).to(query.dtype)
    if sinks is not None:
        weights = weights[..., :-1]
    return F.dropout(weights, dropout) @ value


def _repeat_heads(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Returns [b, heads, s, d] of [b, groups, s, d], each group repeated for all its query heads."""
    return tensor.repeat_interleave(heads // tensor.shape[1], dim=1)
