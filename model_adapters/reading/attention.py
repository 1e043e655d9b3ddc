"""Architectures whose attention Megatron's own ``SelfAttention`` can compute, and when it can."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megasched.language.module_specs import AttentionSpec, MlaSpec
from megasched.model_adapters.reading.stock import why_altered

if TYPE_CHECKING:
    from torch import nn

# Latent attention as in DeepSeek-V3.
LATENT = ("deepseek_v3", "glm4_moe_lite", "youtu")
_LLAMA: dict[str, Any] = {}
_LAYER_NORM = {"normalization": "LayerNorm"}
_NEIGHBOURS = {"interleaved": True}
_NO_POSITIONS = {"rotary": ""}
_SINKS = {"sinks": "self_attn.sinks"}
_PLUS_ONE = {"zero_centered": True}
_NORMED_HEADS = {"q_norm": "self_attn.q_layernorm", "k_norm": "self_attn.k_layernorm"}
_GATED = {**_PLUS_ONE, "gated": True}
_LFM2 = {**_NORMED_HEADS, "out": "self_attn.out_proj"}
_FAIRSEQ = {**_LAYER_NORM, **_NO_POSITIONS, "out": "self_attn.out_proj"}  # learned ones are in the embedding
_BY_HEADS = {"qkv": "self_attn.query_key_value", "by_heads": True, "out": "self_attn.dense"}
# Model type -> what of its attention is not as in Llama's, but for what is read off the definition: that it is
# latent, norms of heads, windows, scales, and which layers have positions. Each is proven in
# tests/parity/test_attentions.py.
ATTENTIONS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("llama", "mistral", "ministral", "qwen2", "qwen3", "cwm", "seed_oss", "smollm3"), _LLAMA),
    **dict.fromkeys(("internlm3", "iquestcoder", "arcee", "exaone", "exaone4", "hyperclovax", "olmo"), _LLAMA),
    **dict.fromkeys(("mixtral", "qwen3_moe", "qwen2_moe", "dots1", "glm4_moe", "solar_open", "phimoe"), _LLAMA),
    **dict.fromkeys(("exaone_moe", "hy_v3", "minimax", "mellum", "bamba", "aria_text", *LATENT), _LLAMA),
    **dict.fromkeys(("apertus", "apertus1p5_text", "sarvam_moe", "lara_mini"), _LLAMA),
    **dict.fromkeys(("granite", "granitemoe", "granitemoeshared", "granitemoehybrid"), _LLAMA),
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text", "vaultgemma"), _PLUS_ONE),
    **dict.fromkeys(("gpt_oss", "flint"), _SINKS),
    **dict.fromkeys(("ernie4_5", "ernie4_5_moe", "helium", "glm", "glm4"), _NEIGHBOURS),
    **dict.fromkeys(("cohere", "cohere2", "cohere2_moe"), _NEIGHBOURS),
    "nemotron": {**_LAYER_NORM, **_PLUS_ONE},
    **dict.fromkeys(("jais2", "stablelm", "starcoder2"), _LAYER_NORM),
    "lfm2": _LFM2,
    "lfm2_moe": {**_LFM2, "rotary": "model.pos_emb"},
    **dict.fromkeys(("opt", "biogpt", "xglm"), _FAIRSEQ),
    "phi3": {"qkv": "self_attn.qkv_proj"},
    "persimmon": {**_LAYER_NORM, **_BY_HEADS},
    "phi": {**_LAYER_NORM, "out": "self_attn.dense"},
    "gpt2": {**_LAYER_NORM, **_NO_POSITIONS, "qkv": "attn.c_attn", "out": "attn.c_proj"},
    "gpt_neox": {
        **_LAYER_NORM,
        "qkv": "attention.query_key_value",
        "by_heads": True,
        "out": "attention.dense",
        "rotary": "gpt_neox.rotary_emb",
    },
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), _GATED),
    "jamba": _NO_POSITIONS,
    "nemotron_h": {
        **_NO_POSITIONS,
        "q": "mixer.q_proj",
        "k": "mixer.k_proj",
        "v": "mixer.v_proj",
        "out": "mixer.o_proj",
    },
}
# Kinds of rotary positions whose angles do not depend on the length of the input.
STATIC_ROTARY = ("default", "linear", "llama3", "yarn")
# Model type -> fields of its config with probabilities of dropout: of attention, if its name is another, and of
# what the module returns.
DROPOUT = {"gpt2": "attn_pdrop", "biogpt": "attention_probs_dropout_prob"}
OUT_DROPOUT = {"gpt2": "resid_pdrop"}
# Field of a config -> what it must be; Megatron's attention computes nothing else.
WANTED: dict[str, tuple[Any, ...]] = {
    "use_bidirectional_attention": (None, False),
    "attn_logit_softcapping": (None,),
    "clip_qkv": (None,),
    "reorder_and_upcast_attn": (False,),
}
# Those that have one window for all layers; the others say which layers have it.
_ONE_WINDOW = ("mistral", "mixtral", "phi3", "qwen3_moe", "starcoder2", "phimoe", "minimax")
# Those in which only the layers with a window have positions.
_ROTATED_IN_WINDOWS = ("exaone4", "exaone_moe", "cohere2", "flint", "lara_mini")


def attention_of(model: nn.Module) -> AttentionSpec | str:
    """How attention in a definition's decoder layers is put together, or why Megatron's can't stand for it."""
    config: Any = model.config
    kind = config.model_type
    if kind not in ATTENTIONS:
        return f"no attention is known for model type {kind!r}"
    special = dict(ATTENTIONS[kind])
    if getattr(config, "position_embedding_type", "rope") != "rope":  # granitemoehybrid
        special |= _NO_POSITIONS
    reason = _why_not(config, model, special.get("rotary", AttentionSpec.rotary))
    if reason:
        return reason
    attention = AttentionSpec(
        heads=config.num_attention_heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        head_dim=_head_dim(config),
        dropout=getattr(config, DROPOUT.get(kind, "attention_dropout"), 0.0),
        out_dropout=getattr(config, OUT_DROPOUT[kind]) if kind in OUT_DROPOUT else 0.0,
        windows=_windows(config),
        rotated=_rotated(config),
        mla=_latent(config, model) if kind in LATENT else None,
        **special,
    )
    ending = f".{attention.out}"
    layers = [path.removesuffix(ending) for path, _ in model.named_modules() if path.endswith(ending)]
    if not layers:
        return f"no layer has {attention.out}"
    if reason := why_altered(model, [f"{layer}.{attention.module}" for layer in layers], around=True):
        return reason
    if attention.mla is not None:  # which has scales of its own
        return attention
    normed = _with_norms(attention, model, layers)
    return normed if isinstance(normed, str) else _with_scales(normed, model, layers)


def _with_norms(attention: AttentionSpec, model: nn.Module, layers: list[str]) -> AttentionSpec | str:
    """With the norms of heads that there are, and their epsilon; or why there is no such."""
    first = model.get_submodule(layers[0])
    names = [("self_attn.q_norm", "self_attn.k_norm"), tuple(_NORMED_HEADS.values())]
    found = [pair for pair in names if f"{pair[0]}.weight" in dict(first.named_parameters())]
    if not found:
        return replace(attention, q_norm="", k_norm="")
    attention = replace(attention, q_norm=found[0][0], k_norm=found[0][1])
    norms: list[Any] = [model.get_submodule(f"{layer}.{norm}") for layer in layers for norm in attention.norms]
    shape = list(norms[0].weight.shape)
    if shape != [attention.head_dim]:
        return f"the weight of {attention.q_norm} is {shape}, and Megatron's norms are of one head, alike for all"
    return replace(attention, eps=norm_eps(norms[0]))


def norm_eps(norm: Any) -> float:
    """Its epsilon, by whatever name."""
    found = getattr(norm, "variance_epsilon", None)  # which may be 0
    return norm.eps if found is None else found


def _with_scales(attention: AttentionSpec, model: nn.Module, layers: list[str]) -> AttentionSpec | str:
    """With what attention and rotary positions are scaled by, or why it is not one number."""
    modules: list[Any] = [model.get_submodule(f"{layer}.{attention.module}") for layer in layers]
    scales = {module.scaling for module in modules}
    if len(scales) > 1:
        return "layers scale their attention differently"
    scale = scales.pop()
    if abs(scale * attention.head_dim**0.5 - 1) > 1e-6:
        attention = replace(attention, softmax_scale=scale)
    if not attention.rotary:
        return attention
    rotary: Any = model.get_submodule(attention.rotary)
    if isinstance(rotary.rope_type, dict):
        attention = replace(
            attention, frequencies=tuple(f"{kind}_inv_freq" for kind in _layer_types(model.config))
        )
    prefixes = {name.removesuffix("inv_freq") for name in attention.frequencies} or {""}
    factors = {getattr(rotary, f"{prefix}attention_scaling") for prefix in prefixes}
    if len(factors) > 1:
        return "layers scale their rotary positions differently"
    return replace(attention, rotary_factor=factors.pop())


def _head_dim(config: Any) -> int:
    if config.model_type in LATENT:
        return config.qk_nope_head_dim + config.qk_rope_head_dim
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _latent(config: Any, model: Any) -> MlaSpec:
    rope, attention = config.rope_parameters, model.get_submodule("model.layers.0.self_attn")
    scaled = rope["rope_type"] != "default" and bool(rope.get("mscale_all_dim", 0))
    return MlaSpec(
        kv_lora_rank=config.kv_lora_rank,
        qk_nope_head_dim=config.qk_nope_head_dim,
        qk_rope_head_dim=config.qk_rope_head_dim,
        v_head_dim=config.v_head_dim,
        q_lora_rank=config.q_lora_rank,
        eps=attention.kv_a_layernorm.variance_epsilon,
        rotary_factor=model.get_submodule("model.rotary_emb").attention_scaling,
        softmax_factor=rope["factor"] if scaled else 1.0,
        softmax_mscale=rope["mscale_all_dim"] if scaled else 0.0,
    )


def _why_not(config: Any, model: Any, rotary: str) -> str:
    for field, wanted in WANTED.items():
        if getattr(config, field, wanted[0]) not in wanted:
            return f"{field} is {getattr(config, field)!r}, and Megatron's layer computes what {wanted[0]!r} does"
    if config.model_type in LATENT and not config.rope_interleave:
        return "rope_interleave is false, and Megatron's latent attention rotates neighbours"
    if config.model_type in LATENT and config.q_lora_rank is None:
        return "q is not compressed (q_lora_rank), and Megatron's latent attention would norm what it is made of"
    if rotary and rotary not in dict(model.named_modules()):
        return f"there is no module {rotary}"
    if rotary and (reason := why_altered(model, [rotary])):
        return reason
    kinds = model.get_submodule(rotary).rope_type if rotary else {}
    for kind in sorted(set(kinds.values())) if isinstance(kinds, dict) else [kinds]:
        if kind not in STATIC_ROTARY:
            return f"rotary positions of type {kind!r} depend on the input"
    return ""


def _layer_types(config: Any) -> tuple[str, ...]:
    return tuple(getattr(config, "layer_types", None) or ())


def _windows(config: Any) -> tuple[int | None, ...]:
    window = getattr(config, "sliding_window", None)
    if config.model_type in _ONE_WINDOW:
        return (window,) * config.num_hidden_layers
    return tuple(window if kind == "sliding_attention" else None for kind in _layer_types(config))


def _rotated(config: Any) -> tuple[bool, ...]:
    if config.model_type in _ROTATED_IN_WINDOWS and config.sliding_window is not None:
        return tuple(kind == "sliding_attention" for kind in _layer_types(config))
    if config.model_type == "cohere2_moe":
        forced = config.prefix_dense_sliding_window_pattern == 1
        kinds = zip(_layer_types(config), config.mlp_layer_types, strict=True)
        return tuple(kind == "sliding_attention" or (forced and mlp == "dense") for kind, mlp in kinds)
    return tuple(bool(rotated) for rotated in getattr(config, "no_rope_layers", None) or ())
