"""Architectures whose decoder layer Megatron's own ``TransformerLayer`` can compute, and when it can."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megasched.roles import Block

if TYPE_CHECKING:
    from torch import nn

# Model types whose layers are built as Llama's are; tests/parity/test_levels.py proves each of them.
LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3")
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
    normed = config.model_type == "qwen3"
    return Block(
        heads=config.num_attention_heads,
        groups=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        eps=config.rms_norm_eps,
        attention_dropout=config.attention_dropout,
        q_norm="self_attn.q_norm" if normed else "",
        k_norm="self_attn.k_norm" if normed else "",
    )


def _why_not(config: Any, model: Any) -> str:
    if config.hidden_act != "silu":
        return f"hidden_act is {config.hidden_act!r}, and Megatron's gated MLP is given silu"
    kind = model.get_submodule("model.rotary_emb").rope_type
    if kind not in PLAIN_ROTARY:
        return f"rotary positions of type {kind!r} depend on the input or are scaled"
    if getattr(config, "attention_bias", False) or getattr(config, "mlp_bias", False):
        return "attention_bias or mlp_bias puts biases on output projections"
    windowed = "sliding_attention" in (getattr(config, "layer_types", None) or ())
    if windowed or (config.model_type == "mistral" and config.sliding_window is not None):
        return "attention is cut to a sliding window"
    return ""
