"""Computes attention with soft-capped logits (Gemma 2) by torch's FlexAttention, compiled: one kernel forward.

Spelled out, it reads and writes [b, heads, s, s] tensors eight times and keeps several for the backward.
Transformer Engine has a kernel for it with flash-attn alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.nn.attention import flex_attention as flex

from megasched.layers.fused.kernels import compiles

_LEAST_WIDTH = 16  # of a head, in FlexAttention's kernels


def takes(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Returns whether there is a kernel for [b, heads, s, d] tensors of these devices, types and widths."""
    widths = (query.shape[-1], value.shape[-1])
    whole = query.shape[2] == key.shape[2]
    return whole and compiles(query.device) and query.dtype != torch.float64 and min(widths) >= _LEAST_WIDTH


def capped_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    softcap: float,
    left: int,
    scaling: float | None,
) -> torch.Tensor:
    """Computes causal attention with logits ``softcap * tanh(logits / softcap)``; returns [b, heads, s, d].

    Args:
        query, key, value: [b, heads, s, d]; key and value may have fewer heads, in groups.
        left: how many tokens before its own a query attends to; -1 for all.
    """
    grouped = query.shape[1] != key.shape[1]
    mask = _mask(query.shape[2], left, query.device)
    compute = _compiled(flex.flex_attention)
    return compute(query, key, value, _capped(softcap), mask, scale=scaling, enable_gqa=grouped)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function)


@cache
def _mask(length: int, left: int, device: torch.device) -> flex.BlockMask:
    """Returns which blocks of tokens attend to which; compiled, as no [s, s] tensor is made on the way."""
    return _compiled(flex.create_block_mask)(_attended(left), None, None, length, length, device=device)


@cache
def _attended(left: int) -> Callable[..., torch.Tensor]:
    def attended(b: Any, head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (query >= key) & (query - key <= left) if left >= 0 else query >= key

    return attended


@cache
def _capped(softcap: float) -> Callable[..., torch.Tensor]:
    def capped(score: torch.Tensor, b: Any, head: Any, query: Any, key: Any) -> torch.Tensor:
        return softcap * torch.tanh(score / softcap)

    return capped
