"""Architectures whose decoder layer Megatron's own ``TransformerLayer`` can compute, and when it can."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megasched.roles import Block, Mixture

if TYPE_CHECKING:
    from torch import nn

# Model types whose layers are built as Llama's are; tests/parity/test_levels.py proves each of them.
MIXTURES = ("mixtral", "qwen3_moe")  # as Llama's, but for their MLP
LLAMA_LIKE = (
    *("llama", "mistral", "ministral", "qwen2", "qwen3", "cwm", "seed_oss", "smollm3"),
    *("internlm3", "iquestcoder"),  # both by Llama's class
    "phi3",
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
    normed, packed = config.model_type in ("qwen3", "qwen3_moe"), config.model_type == "phi3"
    return Block(
        heads=config.num_attention_heads,
        groups=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        eps=config.rms_norm_eps,
        attention_dropout=config.attention_dropout,
        hidden_dropout=config.resid_pdrop if packed else getattr(config, "residual_dropout", 0.0),
        windows=_windows(config),
        rotated=tuple(bool(rotated) for rotated in getattr(config, "no_rope_layers", None) or ()),
        qkv="self_attn.qkv_proj" if packed else "",
        gate_up="mlp.gate_up_proj" if packed else "",
        q_norm="self_attn.q_norm" if normed else "",
        k_norm="self_attn.k_norm" if normed else "",
        mixture=_mixture(config),
    )


def _mixture(config: Any) -> Mixture | None:
    if config.model_type not in MIXTURES:
        return None
    normalized = getattr(config, "norm_topk_prob", True)  # Mixtral's always are
    return Mixture("mlp.gate", "mlp.experts", config.num_experts_per_tok, normalized)


def _why_not(config: Any, model: Any) -> str:
    if config.hidden_act != "silu":
        return f"hidden_act is {config.hidden_act!r}, and Megatron's gated MLP is given silu"
    kind = model.get_submodule("model.rotary_emb").rope_type
    if kind not in PLAIN_ROTARY:
        return f"rotary positions of type {kind!r} depend on the input or are scaled"
    if getattr(config, "output_router_logits", False):
        return "output_router_logits adds a loss of HF's routers, which are gone then"
    if getattr(config, "router_jitter_noise", 0.0):
        return "router_jitter_noise changes what HF's routers see"
    return ""


def _windows(config: Any) -> tuple[int | None, ...]:
    """Of each layer; some have one for all layers, the others say which layers have it."""
    window = getattr(config, "sliding_window", None)
    if config.model_type in ("mistral", "mixtral", "phi3", "qwen3_moe"):
        return (window,) * config.num_hidden_layers
    kinds = getattr(config, "layer_types", None) or ()
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
