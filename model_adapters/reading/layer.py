"""Architectures whose decoder layer Megatron's own ``TransformerLayer`` can compute, and when it can."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megasched.language.module_specs import Activation, LayerSpec, MlpSpec
from megasched.model_adapters.reading.attention import LATENT, attention_of, norm_eps
from megasched.model_adapters.reading.stock import why_altered

if TYPE_CHECKING:
    from torch import nn

# With experts in some layers or in all (mixtures.py), and else as Llama's.
MIXTURES = (
    *("mixtral", "qwen3_moe", "qwen2_moe", "dots1", "glm4_moe", "solar_open", "exaone_moe", "hy_v3", "gpt_oss"),
    "sarvam_moe",  # by GLM-4-MoE's class
    *LATENT,
)
_LLAMA: dict[str, Any] = {}
_UNGATED = {"mlp": MlpSpec(gate="")}
_PACKED_MLP = {"mlp": MlpSpec("", "", "mlp.down_proj", "mlp.gate_up_proj")}
_GPT2_MLP = MlpSpec(gate="", up="mlp.c_fc", down="mlp.c_proj")
# As OPT has it.
_FAIRSEQ = {
    "input_norm": "self_attn_layer_norm",
    "mlp_norm": "final_layer_norm",
    "mlp": MlpSpec(gate="", up="fc1", down="fc2"),
}
# Model type -> what of its layers is not as in Llama's, but for attention, experts and what is read off the
# definition. Each is proven in tests/parity: by test_levels.py, test_layer_kinds.py, test_mixture_blocks.py or
# test_latent_blocks.py.
LAYERS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("llama", "mistral", "ministral", "qwen2", "qwen3", "cwm", "seed_oss", "smollm3"), _LLAMA),
    **dict.fromkeys(("internlm3", "iquestcoder", "exaone"), _LLAMA),  # by Llama's class
    **dict.fromkeys((*MIXTURES, "gemma", "ernie4_5", "helium", "stablelm"), _LLAMA),
    "phi3": _PACKED_MLP,
    **dict.fromkeys(("arcee", "nemotron", "jais2"), _UNGATED),
    "gemma3_text": {
        "attention_post_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_post_norm": "post_feedforward_layernorm",
    },
    "vaultgemma": {"mlp_norm": "pre_feedforward_layernorm"},
    "glm": _PACKED_MLP,
    "glm4": {
        **_PACKED_MLP,
        "attention_post_norm": "post_self_attn_layernorm",
        "mlp_post_norm": "post_mlp_layernorm",
    },
    "exaone4": {
        "input_norm": "",
        "mlp_norm": "",
        "attention_post_norm": "post_attention_layernorm",
        "mlp_post_norm": "post_feedforward_layernorm",
    },
    "starcoder2": {"mlp": _GPT2_MLP},
    "persimmon": {"mlp": MlpSpec(gate="", up="mlp.dense_h_to_4h", down="mlp.dense_4h_to_h")},
    "gpt2": {"input_norm": "ln_1", "mlp_norm": "ln_2", "mlp": _GPT2_MLP},
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
# Model type -> field of its config with the probability of dropout in what is added to the hidden state, if its
# name is another.
DROPOUT = {
    "phi3": "resid_pdrop",
    "gpt2": "resid_pdrop",
    **dict.fromkeys(("opt", "xglm"), "dropout"),
    "biogpt": "hidden_dropout_prob",
}
# Field of a config -> what it must be; Megatron's layer computes nothing else.
WANTED: dict[str, tuple[Any, ...]] = {
    "use_parallel_residual": (False,),
    "do_layer_norm_before": (True,),
    "activation_dropout": (0.0,),
    "hidden_dropout": (0.0,),  # stablelm, persimmon: of the MLP alone
}


def block_of(model: nn.Module) -> LayerSpec | str:
    """How the decoder layers of a definition are put together, or why Megatron's layer can't stand for them."""
    config: Any = model.config
    kind = config.model_type
    if kind not in LAYERS:
        return f"no block is known for model type {kind!r}"
    attention, reason = attention_of(model), _why_not(config)
    if reason or isinstance(attention, str):
        return reason or str(attention)
    dropout = getattr(config, DROPOUT.get(kind, "residual_dropout"), 0.0)
    block = LayerSpec(attention, hidden_dropout=dropout, **LAYERS[kind])
    block = replace(block, mlp=replace(block.mlp, activation=ACTIVATIONS[_activation(config)]))
    ending = f".{attention.out}"
    layers = [path.removesuffix(ending) for path, _ in model.named_modules() if path.endswith(ending)]
    if reason := why_altered(model, layers, around=True):
        return reason
    names = (*block.norms, *attention.norms)
    epsilons = {norm_eps(model.get_submodule(f"{layer}.{norm}")) for layer in layers for norm in names}
    if len(epsilons) > 1:
        return f"norms of a layer have different epsilons: {', '.join(map(str, sorted(epsilons)))}"
    return replace(block, attention=replace(attention, eps=epsilons.pop()))


def _activation(config: Any) -> str:
    """HF's name of it."""
    fields = ("hidden_activation", "hidden_act", "activation_function")
    return next(getattr(config, field) for field in fields if getattr(config, field, None))


def _why_not(config: Any) -> str:
    if _activation(config) not in ACTIVATIONS:
        return f"the activation is {_activation(config)!r}, and Megatron's MLP is given {', '.join(ACTIVATIONS)}"
    for field, wanted in WANTED.items():
        if getattr(config, field, wanted[0]) not in wanted:
            return f"{field} is {getattr(config, field)!r}, and Megatron's layer computes what {wanted[0]!r} does"
    return ""
