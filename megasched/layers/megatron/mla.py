"""Configures Megatron's ``MLASelfAttention`` for latent attention, and replaces some of its parts.

Its rotary embedding computes its own positions; the definition's angles replace it. Without Transformer Engine its
down projections would be sharded over TP and gathered again; they are replicated instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn
from torch.nn import functional as F

from megasched.language.module_specs import MlaSpec


def latent_config(latent: MlaSpec) -> dict[str, Any]:
    """Returns the fields of Megatron's config for latent attention (``MLATransformerConfig``)."""
    return {
        "multi_latent_attention": True,
        "q_lora_rank": latent.q_lora_rank,
        "kv_lora_rank": latent.kv_lora_rank,
        "qk_head_dim": latent.qk_nope_head_dim,
        "qk_pos_emb_head_dim": latent.qk_rope_head_dim,
        "v_head_dim": latent.v_head_dim,
        "qk_layernorm": True,
        "cache_mla_latents": False,
        "mla_down_proj_fusion": False,
        # With the first, the embedding hands out a factor beside the angles.
        "rope_type": "rope" if latent.rotary_factor == 1 else "yarn",
        "rotary_base": 10000.0,
        "rotary_percent": 1.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        # The softmax is scaled by (0.1 mscale_all_dim ln(rotary_scaling_factor) + 1)^2.
        "rotary_scaling_factor": latent.softmax_factor,
        "mscale_all_dim": latent.softmax_mscale,
        "apply_rope_fusion": False,  # its kernel takes a table of Megatron's own
    }


class LatentAngles(nn.Module):
    """Replaces Megatron's rotary embedding in latent attention.

    Args:
        angles: length of the whole hidden state -> angles [s, 1, 1, d] of this rank, float32.
        parts: number of parts into which sequence parallelism splits the hidden state.
        factor: factor of cosine and sine.
    """

    def __init__(self, angles: Callable[[int], torch.Tensor], parts: int, factor: float) -> None:
        super().__init__()
        self.angles, self.parts, self.factor = angles, parts, factor

    def get_rotary_seq_len(
        self, inference_context: Any, transformer: Any, hidden: torch.Tensor, config: Any, packed: Any
    ) -> int:
        """Returns the length of the whole sequence of a hidden state [s (/ tp under SP), b, h]."""
        return hidden.shape[0] * self.parts

    def forward(self, length: int, packed_seq: bool = False) -> torch.Tensor | tuple[torch.Tensor, float]:
        angles = self.angles(length)
        return angles if self.factor == 1 else (angles, self.factor)


class WholeLinear(nn.Module):
    """Computes a linear that is replicated over TP; like Megatron's it returns a separate bias, which is None."""

    def __init__(self, in_features: int, out_features: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=dtype, device=device))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return F.linear(x, self.weight), None


def configure_mla(
    attention: Any,
    latent: MlaSpec,
    config: TransformerConfig,
    angles: LatentAngles,
    device: torch.device,
    te: bool,
) -> None:
    """Replaces the parts of a new ``MLASelfAttention`` that differ from the definition.

    Args:
        te: it consists of Transformer Engine's modules, which include a replicated linear.
    """
    attention.rotary_pos_emb = angles
    for name in ("q_layernorm", "kv_layernorm", "linear_q_up_proj", "linear_kv_up_proj"):
        norm = getattr(attention, name, None)
        if hasattr(norm, "eps"):  # of Transformer Engine's, the projection has the norm in it
            norm.eps = latent.eps
    if te:
        return
    sizes = {
        "linear_q_down_proj": latent.q_lora_rank,
        "linear_kv_down_proj": latent.kv_lora_rank + latent.qk_rope_head_dim,
    }
    for name, size in sizes.items():
        whole = WholeLinear(config.hidden_size, size, config.params_dtype, device)
        setattr(attention, name, whole)
