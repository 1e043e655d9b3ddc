"""Architectures whose decoder layer Megatron's own ``TransformerLayer`` can compute, and when it can."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megasched.roles import Activation, Block, Latent, Mlp

if TYPE_CHECKING:
    from torch import nn

# Latent attention as in DeepSeek-V3.
LATENT = ("deepseek_v3", "glm4_moe_lite", "youtu")
# With experts in some layers or in all (mixtures.py), and else as Llama's.
MIXTURES = (
    *("mixtral", "qwen3_moe", "qwen2_moe", "dots1", "glm4_moe", "solar_open", "exaone_moe", "hy_v3"),
    *("deepseek_v3", "glm4_moe_lite"),
)
_LLAMA: dict[str, Any] = {}
_UNGATED = {"mlp": Mlp(gate="")}
_PLUS_ONE = {"zero_centered": True}
_LAYER_NORM = {"normalization": "LayerNorm"}
_NEIGHBOURS = {"interleaved": True}
_PACKED_MLP = {"mlp": Mlp("", "", "mlp.down_proj", "mlp.gate_up_proj")}
_GPT2_MLP = Mlp(gate="", up="mlp.c_fc", down="mlp.c_proj")
# As OPT has it; learned positions are added to the embedding.
_FAIRSEQ = {
    **_LAYER_NORM,
    "rotary": "",
    "input_norm": "self_attn_layer_norm",
    "mlp_norm": "final_layer_norm",
    "out": "self_attn.out_proj",
    "mlp": Mlp(gate="", up="fc1", down="fc2"),
}
# Model type -> what of its layers is not as in Llama's, but for experts, latent attention and what is read off the
# definition. Each is proven in tests/parity: by test_levels.py, test_layer_kinds.py, test_mixture_blocks.py or
# test_latent_blocks.py.
LAYERS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("llama", "mistral", "ministral", "qwen2", "qwen3", "cwm", "seed_oss", "smollm3"), _LLAMA),
    **dict.fromkeys(("internlm3", "iquestcoder"), _LLAMA),  # both by Llama's class
    **dict.fromkeys(("youtu", *MIXTURES), _LLAMA),
    "gpt_oss": {"sinks": "self_attn.sinks"},
    "phi3": {**_PACKED_MLP, "qkv": "self_attn.qkv_proj"},
    "arcee": _UNGATED,
    "gemma": _PLUS_ONE,
    "gemma3_text": {
        **_PLUS_ONE,
        "attention_post_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_post_norm": "post_feedforward_layernorm",
    },
    "vaultgemma": {**_PLUS_ONE, "mlp_norm": "pre_feedforward_layernorm"},
    **dict.fromkeys(("ernie4_5", "helium"), _NEIGHBOURS),
    "glm": {**_PACKED_MLP, **_NEIGHBOURS},
    "glm4": {
        **_PACKED_MLP,
        **_NEIGHBOURS,
        "attention_post_norm": "post_self_attn_layernorm",
        "mlp_post_norm": "post_mlp_layernorm",
    },
    "exaone4": {
        "input_norm": "",
        "mlp_norm": "",
        "attention_post_norm": "post_attention_layernorm",
        "mlp_post_norm": "post_feedforward_layernorm",
    },
    "nemotron": {**_LAYER_NORM, **_PLUS_ONE, **_UNGATED},
    "jais2": {**_LAYER_NORM, **_UNGATED},
    "stablelm": _LAYER_NORM,
    "starcoder2": {**_LAYER_NORM, "mlp": _GPT2_MLP},
    "persimmon": {
        **_LAYER_NORM,
        "qkv": "self_attn.query_key_value",
        "by_heads": True,
        "out": "self_attn.dense",
        "mlp": Mlp(gate="", up="mlp.dense_h_to_4h", down="mlp.dense_4h_to_h"),
    },
    "gpt2": {
        **_LAYER_NORM,
        "rotary": "",
        "input_norm": "ln_1",
        "mlp_norm": "ln_2",
        "qkv": "attn.c_attn",
        "out": "attn.c_proj",
        "mlp": _GPT2_MLP,
    },
    **dict.fromkeys(("opt", "biogpt", "xglm"), _FAIRSEQ),
}
# HF's name of an activation -> Mlp's
ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    **dict.fromkeys(("gelu_pytorch_tanh", "gelu_new", "gelu_fast"), "gelu_tanh"),
    "relu": "relu",
    "relu2": "squared_relu",
}
# Kinds of rotary positions whose angles do not depend on the length of the input.
STATIC_ROTARY = ("default", "linear", "llama3", "yarn")
# Model type -> fields of its config with the probabilities of dropout: of attention, and of what is added to the
# hidden state.
DROPOUTS = {
    "phi3": ("attention_dropout", "resid_pdrop"),
    "gpt2": ("attn_pdrop", "resid_pdrop"),
    **dict.fromkeys(("opt", "xglm"), ("attention_dropout", "dropout")),
    "biogpt": ("attention_probs_dropout_prob", "hidden_dropout_prob"),
}
# Field of a config -> what it must be; Megatron's layer computes nothing else.
WANTED: dict[str, tuple[Any, ...]] = {
    "use_bidirectional_attention": (None, False),
    "attn_logit_softcapping": (None,),
    "use_parallel_residual": (False,),
    "do_layer_norm_before": (True,),
    "reorder_and_upcast_attn": (False,),
    "activation_dropout": (0.0,),
    "hidden_dropout": (0.0,),  # stablelm, persimmon: of the MLP alone
}


def block_of(model: nn.Module) -> Block | str:
    """How the decoder layers of a definition are put together, or why Megatron's layer can't stand for them."""
    config: Any = model.config
    kind = config.model_type
    if kind not in LAYERS:
        return f"no block is known for model type {kind!r}"
    rotary = LAYERS[kind].get("rotary", Block.rotary)
    reason = _why_not(config, model, rotary)
    if reason:
        return reason
    attention_dropout, hidden_dropout = DROPOUTS.get(kind, ("attention_dropout", "residual_dropout"))
    block = Block(
        heads=config.num_attention_heads,
        groups=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        head_dim=_head_dim(config),
        eps=0.0,  # read off the norms below
        attention_dropout=getattr(config, attention_dropout, 0.0),
        hidden_dropout=getattr(config, hidden_dropout, 0.0),
        windows=_windows(config),
        rotated=_rotated(config),
        frequencies=_frequencies(config),
        latent=_latent(config, model) if kind in LATENT else None,
        **LAYERS[kind],
    )
    block = replace(block, mlp=replace(block.mlp, activation=ACTIVATIONS[_activation(config)]))
    ending = f".{block.out}"
    layers = [path.removesuffix(ending) for path, _ in model.named_modules() if path.endswith(ending)]
    normed = _with_norms(block, model, layers)
    if isinstance(normed, str) or normed.latent is not None:  # which has scales of its own
        return normed
    return _with_scales(normed, model, layers)


def _with_norms(block: Block, model: nn.Module, layers: list[str]) -> Block | str:
    """With the norms of heads that there are, and the epsilon of all norms; or why there is no such."""
    parameters = dict(model.named_parameters())
    for name in ("norm", "layernorm"):
        q, k = f"self_attn.q_{name}", f"self_attn.k_{name}"
        if f"{layers[0]}.{q}.weight" in parameters:
            block = replace(block, q_norm=q, k_norm=k)
    norms = [model.get_submodule(f"{layer}.{norm}") for layer in layers for norm in block.norms]
    epsilons = {getattr(norm, "variance_epsilon", None) or norm.eps for norm in norms}
    if len(epsilons) > 1:
        return f"norms of a layer have different epsilons: {', '.join(map(str, sorted(epsilons)))}"
    return replace(block, eps=epsilons.pop())


def _with_scales(block: Block, model: nn.Module, layers: list[str]) -> Block | str:
    """With what attention and rotary positions are scaled by, or why it is not one number."""
    attentions: list[Any] = [model.get_submodule(f"{layer}.{block.out}".rpartition(".")[0]) for layer in layers]
    scales = {attention.scaling for attention in attentions}
    if len(scales) > 1:
        return "layers scale their attention differently"
    scale = scales.pop()
    if abs(scale * block.head_dim**0.5 - 1) > 1e-6:
        block = replace(block, softmax_scale=scale)
    if not block.rotary:
        return block
    rotary = model.get_submodule(block.rotary)
    prefixes = {name.removesuffix("inv_freq") for name in block.frequencies} or {""}
    factors = {getattr(rotary, f"{prefix}attention_scaling") for prefix in prefixes}
    if len(factors) > 1:
        return "layers scale their rotary positions differently"
    return replace(block, rotary_factor=factors.pop())


def _head_dim(config: Any) -> int:
    if config.model_type in LATENT:
        return config.qk_nope_head_dim + config.qk_rope_head_dim
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _activation(config: Any) -> str:
    """HF's name of it."""
    fields = ("hidden_activation", "hidden_act", "activation_function")
    return next(getattr(config, field) for field in fields if getattr(config, field, None))


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


def _why_not(config: Any, model: Any, rotary: str) -> str:
    if _activation(config) not in ACTIVATIONS:
        return f"the activation is {_activation(config)!r}, and Megatron's MLP is given {', '.join(ACTIVATIONS)}"
    for field, wanted in WANTED.items():
        if getattr(config, field, wanted[0]) not in wanted:
            return f"{field} is {getattr(config, field)!r}, and Megatron's layer computes what {wanted[0]!r} does"
    if config.model_type in LATENT and not config.rope_interleave:
        return "rope_interleave is false, and Megatron's latent attention rotates neighbours"
    if config.model_type in LATENT and config.q_lora_rank is None:
        return "q is not compressed (q_lora_rank), and Megatron's latent attention would norm what it is made of"
    kinds = model.get_submodule(rotary).rope_type if rotary else {}
    for kind in sorted(set(kinds.values())) if isinstance(kinds, dict) else [kinds]:
        if kind not in STATIC_ROTARY:
            return f"rotary positions of type {kind!r} depend on the input"
    return ""


def _layer_types(config: Any) -> tuple[str, ...]:
    return tuple(getattr(config, "layer_types", None) or ())


def _windows(config: Any) -> tuple[int | None, ...]:
    """Of each layer; some have one for all layers, the others say which layers have it."""
    window = getattr(config, "sliding_window", None)
    if config.model_type in ("mistral", "mixtral", "phi3", "qwen3_moe", "starcoder2"):
        return (window,) * config.num_hidden_layers
    return tuple(window if kind == "sliding_attention" else None for kind in _layer_types(config))


def _rotated(config: Any) -> tuple[bool, ...]:
    if config.model_type in ("exaone4", "exaone_moe") and config.sliding_window is not None:
        return tuple(kind == "sliding_attention" for kind in _layer_types(config))
    return tuple(bool(rotated) for rotated in getattr(config, "no_rope_layers", None) or ())


def _frequencies(config: Any) -> tuple[str, ...]:
    if config.model_type == "gemma3_text":
        return tuple(f"{kind}_inv_freq" for kind in _layer_types(config))
    return ()
