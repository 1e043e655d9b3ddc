"""Transformer Engine's ``DotProductAttention`` behind the same attention function, where TE is there.

TE picks among its kernels (cuDNN fused, flash, unfused) by itself. What it can't do here (soft-capped logits,
sinks, position bias, masks of other shapes) stays with torch.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import Any

import torch


@cache
def te_attention() -> type | None:
    """TE's ``DotProductAttention``, or None where TE can't be imported."""
    if importlib.util.find_spec("transformer_engine") is None:
        return None
    from transformer_engine.pytorch import DotProductAttention

    return DotProductAttention


def uses_transformer_engine(device: torch.device) -> bool:
    """Whether models on this device are made of TE's modules: it has kernels for GPUs alone."""
    return device.type == "cuda" and te_attention() is not None


def window_of(sliding_window: int | None, length: int) -> tuple[int, int]:
    """TE's (left, right) window of a causal layer; HF counts the token itself, TE does not. (-1, 0): no window."""
    if sliding_window is None or sliding_window >= length:
        return (-1, 0)
    return (sliding_window - 1, 0)


class TeCore:
    """The TE modules of one attention module, one for each form of call that it makes.

    Args:
        tp_size, tp_group: of the ranks that share the heads.
    """

    def __init__(self, tp_size: int, tp_group: Any) -> None:
        self.tp_size, self.tp_group = tp_size, tp_group
        self._made: dict[tuple[Any, ...], Any] = {}

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        causal: bool,
        window: tuple[int, int],
        dropout: float,
        scaling: float | None,
    ) -> torch.Tensor:
        """Attention of [b, heads, s, d] tensors (HF's order); returns [b, heads, s, d]."""
        form = (query.shape[1], key.shape[1], query.shape[-1], value.shape[-1], causal, window, dropout, scaling)
        if form not in self._made:
            self._made[form] = self._make(*form)
        q, k, v = (t.transpose(1, 2) for t in (query, key, value))
        output = self._made[form](q, k, v)  # [b, s, heads * d]
        return output.view(*q.shape[:3], v.shape[-1]).transpose(1, 2)

    def _make(
        self,
        heads: int,
        groups: int,
        key_width: int,
        value_width: int,
        causal: bool,
        window: tuple[int, int],
        dropout: float,
        scaling: float | None,
    ) -> Any:
        from megatron.core.tensor_parallel import get_cuda_rng_tracker

        cls = te_attention()
        assert cls is not None
        tracker = get_cuda_rng_tracker()
        return cls(
            num_attention_heads=heads * self.tp_size,
            kv_channels=key_width if key_width == value_width else (key_width, value_width),
            num_gqa_groups=groups * self.tp_size,
            attention_dropout=dropout,
            qkv_format="bshd",
            attn_mask_type="causal" if causal else "no_mask",
            window_size=window if causal else (-1, -1),
            tp_size=self.tp_size,
            tp_group=self.tp_group,
            get_rng_state_tracker=get_cuda_rng_tracker if tracker.is_initialized() else None,
            softmax_scale=scaling,
        )
