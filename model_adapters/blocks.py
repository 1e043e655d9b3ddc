"""Architectures whose decoder layer Megatron's own ``TransformerLayer`` can compute, and when it can."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megasched.roles import Block, Latent

if TYPE_CHECKING:
    from torch import nn

# Latent attention as in DeepSeek-V3.
LATENT = ("deepseek_v3", "glm4_moe_lite", "youtu")
# With experts in some layers or in all (mixtures.py).
MIXTURES = (
    *("mixtral", "qwen3_moe", "qwen2_moe", "dots1", "glm4_moe", "solar_open", "deepseek_v3", "glm4_moe_lite"),
)
# Model types whose layers are built as Llama's are, but for experts and latent attention. Each is proven by
# test_levels.py, test_mixture_blocks.py or test_latent_blocks.py in tests/parity.
LLAMA_LIKE = (
    *("llama", "mistral", "ministral", "qwen2", "qwen3", "cwm", "seed_oss", "smollm3"),
    *("internlm3", "iquestcoder"),  # both by Llama's class
    *("phi3", "youtu"),
    *MIXTURES,
)
# Kinds of rotary positions whose angles do not depend on the length of the input and are not scaled.
PLAIN_ROTARY = ("default", "linear", "llama3")


def block_of(model: nn.Module) -> Block | str:
    """How the decoder layers of a definition are put together, or why Megatron's layer can't stand for them."""
    config: Any = model.config
    if config.model_type not in LLAMA_LIKE:
        return f"no block is known for model type {config.model_type!r}"
    reason = _why_not(config, model)
    if reason:
        return reason
    packed = config.model_type == "phi3"
    normed = any(name.endswith(".self_attn.q_norm.weight") for name, _ in model.named_parameters())
    return Block(
        heads=config.num_attention_heads,
        groups=config.num_key_value_heads,
        head_dim=_head_dim(config),
        eps=config.rms_norm_eps,
        attention_dropout=config.attention_dropout,
        hidden_dropout=config.resid_pdrop if packed else getattr(config, "residual_dropout", 0.0),
        windows=_windows(config),
        rotated=tuple(bool(rotated) for rotated in getattr(config, "no_rope_layers", None) or ()),
        qkv="self_attn.qkv_proj" if packed else "",
        gate_up="mlp.gate_up_proj" if packed else "",
        q_norm="self_attn.q_norm" if normed else "",
        k_norm="self_attn.k_norm" if normed else "",
        latent=_latent(config, model) if config.model_type in LATENT else None,
    )


def _head_dim(config: Any) -> int:
    if config.model_type in LATENT:
        return config.qk_nope_head_dim + config.qk_rope_head_dim
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _latent(config: Any, model: Any) -> Latent:
    rope, attention = config.rope_parameters, model.get_submodule("model.layers.0.self_attn")
    scaled = rope["rope_type"] != "default" and bool(rope.get("mscale_all_dim", 0))
    return Latent(
        kv_rank=config.kv_lora_rank,
        plain=config.qk_nope_head_dim,
        rotated=config.qk_rope_head_dim,
        value=config.v_head_dim,
        q_rank=config.q_lora_rank,
        eps=attention.kv_a_layernorm.variance_epsilon,
        factor=model.get_submodule("model.rotary_emb").attention_scaling,
        softmax_factor=rope["factor"] if scaled else 1.0,
        softmax_mscale=rope["mscale_all_dim"] if scaled else 0.0,
    )


def _why_not(config: Any, model: Any) -> str:
    if config.hidden_act != "silu":
        return f"hidden_act is {config.hidden_act!r}, and Megatron's gated MLP is given silu"
    kind = model.get_submodule("model.rotary_emb").rope_type
    if config.model_type in LATENT and not config.rope_interleave:
        return "rope_interleave is false, and Megatron's latent attention rotates neighbours"
    if config.model_type in LATENT and config.q_lora_rank is None:
        return "q is not compressed (q_lora_rank), and Megatron's latent attention would norm what it is made of"
    if kind not in PLAIN_ROTARY and not (config.model_type in LATENT and kind == "yarn"):
        return f"rotary positions of type {kind!r} depend on the input or are scaled"
    return ""


def _windows(config: Any) -> tuple[int | None, ...]:
    """Of each layer; some have one for all layers, the others say which layers have it."""
    window = getattr(config, "sliding_window", None)
    if config.model_type in ("mistral", "mixtral", "phi3", "qwen3_moe"):
        return (window,) * config.num_hidden_layers
    kinds = getattr(config, "layer_types", None) or ()
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
