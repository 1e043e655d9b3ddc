"""Reads the structure of a definition's attention, or the reason why Megatron's own can't replace it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from megasched.errors import Declined
from megasched.language.module_specs import AttentionSpec, MlaSpec
from megasched.model_adapters.reading.stock import why_altered

# How rotary positions may be scaled: in these ways the angles do not depend on the length of the input.
STATIC_ROTARY = ("default", "linear", "llama3", "yarn")
# Field of a config -> what it must be; Megatron's attention computes nothing else.
WANTED: dict[str, tuple[Any, ...]] = {
    "use_bidirectional_attention": (None, False),
    "attn_logit_softcapping": (None,),
    "clip_qkv": (None,),
    "reorder_and_upcast_attn": (False,),
}
# Names of the norms of heads, of q and of k.
HEAD_NORMS = (("self_attn.q_norm", "self_attn.k_norm"), ("self_attn.q_layernorm", "self_attn.k_layernorm"))


def rotated_by_flag(config: Any) -> tuple[bool, ...]:
    """Returns whether each layer has rotary positions, by the config's ``no_rope_layers``; empty if all have."""
    return tuple(bool(rotated) for rotated in getattr(config, "no_rope_layers", None) or ())


def rotated_in_windows(config: Any) -> tuple[bool, ...]:
    """Returns the same if only layers with a window have them; without a window, ``rotated_by_flag`` decides."""
    if config.sliding_window is None:
        return rotated_by_flag(config)
    return tuple(kind == "sliding_attention" for kind in _layer_types(config))


@dataclass(frozen=True)
class AttentionFacts:
    """Holds the facts about a family's attention that its definition does not show; the defaults are Llama's.

    Norms of heads, windows and scales are read. Each family's facts are proven in tests/parity/test_attentions.py.

    Attributes:
        differs: fields of ``AttentionSpec`` whose values are not Llama's, e.g. ``{"out": "self_attn.dense"}``.
        dropout: field of the config with the probability of dropout of attention.
        out_dropout: field with the probability of dropout of the module's output; empty for no dropout.
        one_window: the config's ``sliding_window`` holds for every layer; otherwise ``layer_types`` names its
            layers.
        rotated: returns for a config whether each layer has rotary positions; empty if all have.
        mla: q, k and v are projected from compressed forms, as in DeepSeek-V3.
    """

    differs: Mapping[str, Any] = field(default_factory=dict)
    dropout: str = "attention_dropout"
    out_dropout: str = ""
    one_window: bool = False
    rotated: Callable[[Any], tuple[bool, ...]] = rotated_by_flag
    mla: bool = False


def read_attention(model: nn.Module, facts: AttentionFacts) -> AttentionSpec | Declined:
    """Returns the spec of attention in a definition's layers, or the reason why Megatron's can't replace it."""
    config: Any = model.config
    differs = dict(facts.differs)
    if getattr(config, "position_embedding_type", "rope") != "rope":
        differs["rotary"] = ""
    if reason := _why_not(config, model, facts, differs.get("rotary", AttentionSpec.rotary)):
        return Declined(reason)
    attention = AttentionSpec(
        heads=config.num_attention_heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        head_dim=_head_dim(config, facts),
        dropout=getattr(config, facts.dropout, 0.0),
        out_dropout=getattr(config, facts.out_dropout) if facts.out_dropout else 0.0,
        windows=_windows(config, facts),
        rotated=facts.rotated(config),
        mla=_mla(config, model) if facts.mla else None,
        **differs,
    )
    layers = layers_with(attention, model)
    if not layers:
        return Declined(f"no layer has {attention.out}")
    if reason := why_altered(model, [f"{layer}.{attention.module}" for layer in layers], around=True):
        return Declined(reason)
    if attention.mla is not None:  # which has scales of its own
        return attention
    normed = _with_norms(attention, model, layers)
    return normed if isinstance(normed, Declined) else _with_scales(normed, model, layers)


def layers_with(attention: AttentionSpec, model: nn.Module) -> list[str]:
    """Returns the paths of the layers that have such attention."""
    ending = f".{attention.out}"
    return [path.removesuffix(ending) for path, _ in model.named_modules() if path.endswith(ending)]


def norm_eps(norm: Any) -> float:
    """Returns a norm's epsilon, whatever its attribute is called."""
    found = getattr(norm, "variance_epsilon", None)  # which may be 0
    return norm.eps if found is None else found


def _with_norms(attention: AttentionSpec, model: nn.Module, layers: list[str]) -> AttentionSpec | Declined:
    """Adds the norms of heads, if any, and their epsilon; returns the reason if Megatron has no such norms."""
    first = dict(model.get_submodule(layers[0]).named_parameters())
    names = next((pair for pair in HEAD_NORMS if f"{pair[0]}.weight" in first), None)
    if names is None:
        return attention
    attention = replace(attention, q_norm=names[0], k_norm=names[1])
    norms: list[Any] = [model.get_submodule(f"{layer}.{norm}") for layer in layers for norm in attention.norms]
    shape = list(norms[0].weight.shape)
    if shape != [attention.head_dim]:
        norm = f"the weight of {attention.q_norm} is {shape}"
        return Declined(f"{norm}, and Megatron's norms are of one head, alike for all")
    return replace(attention, eps=norm_eps(norms[0]))


def _with_scales(attention: AttentionSpec, model: nn.Module, layers: list[str]) -> AttentionSpec | Declined:
    """Adds the scales of attention and rotary positions; returns the reason if layers differ in one."""
    modules: list[Any] = [model.get_submodule(f"{layer}.{attention.module}") for layer in layers]
    scales = {module.scaling for module in modules}
    if len(scales) > 1:
        return Declined("layers scale their attention differently")
    scale = scales.pop()
    if abs(scale * attention.head_dim**0.5 - 1) > 1e-6:
        attention = replace(attention, softmax_scale=scale)
    if not attention.rotary:
        return attention
    rotary: Any = model.get_submodule(attention.rotary)
    if isinstance(rotary.rope_type, dict):
        frequencies = tuple(f"{kind}_inv_freq" for kind in _layer_types(model.config))
        attention = replace(attention, frequencies=frequencies)
    prefixes = {name.removesuffix("inv_freq") for name in attention.frequencies} or {""}
    factors = {getattr(rotary, f"{prefix}attention_scaling") for prefix in prefixes}
    if len(factors) > 1:
        return Declined("layers scale their rotary positions differently")
    return replace(attention, rotary_factor=factors.pop())


def _head_dim(config: Any, facts: AttentionFacts) -> int:
    if facts.mla:
        return config.qk_nope_head_dim + config.qk_rope_head_dim
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _mla(config: Any, model: Any) -> MlaSpec:
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


def why_unwanted(config: Any, wanted_values: Mapping[str, tuple[Any, ...]]) -> str:
    """Returns a reason that names a field of a config whose value Megatron's layer would ignore; empty if none."""
    for name, wanted in wanted_values.items():
        if getattr(config, name, wanted[0]) not in wanted:
            return f"{name} is {getattr(config, name)!r}, and Megatron's layer computes what {wanted[0]!r} does"
    return ""


def _why_not(config: Any, model: Any, facts: AttentionFacts, rotary: str) -> str:
    if reason := why_unwanted(config, WANTED):
        return reason
    if facts.mla and not config.rope_interleave:
        return "rope_interleave is false, and Megatron's latent attention rotates neighbours"
    if facts.mla and config.q_lora_rank is None:
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


def _windows(config: Any, facts: AttentionFacts) -> tuple[int | None, ...]:
    window = getattr(config, "sliding_window", None)
    if facts.one_window:
        return (window,) * config.num_hidden_layers
    return tuple(window if kind == "sliding_attention" else None for kind in _layer_types(config))
