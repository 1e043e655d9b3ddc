"""Reads the structure of a definition's decoder layers, or the reason why Megatron's can't replace them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from megasched.errors import Declined
from megasched.language.module_specs import Activation, AttentionSpec, LayerSpec
from megasched.model_adapters.reading.attention import layers_with, norm_eps, why_unwanted
from megasched.model_adapters.reading.stock import why_altered

# HF's name of an activation -> that of ``MlpSpec``.
ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    **dict.fromkeys(("gelu_pytorch_tanh", "gelu_new", "gelu_fast"), "gelu_tanh"),
    "relu": "relu",
    "relu2": "squared_relu",
}
# Field of a config -> what it must be; Megatron's layer computes nothing else.
WANTED: dict[str, tuple[Any, ...]] = {
    "use_parallel_residual": (False,),
    "do_layer_norm_before": (True,),
    "activation_dropout": (0.0,),
    "hidden_dropout": (0.0,),  # stablelm, persimmon: of the MLP alone
}


@dataclass(frozen=True)
class LayerFacts:
    """Holds the facts about a family's decoder layers that its definition does not show; the defaults are Llama's.

    Each family's facts are proven in tests/parity: by test_levels.py, test_layer_kinds.py, test_mixture_blocks.py
    or test_latent_blocks.py.

    Attributes:
        differs: fields of ``LayerSpec`` whose values are not Llama's, e.g. ``{"input_norm": "ln_1"}``.
        dropout: field of the config with the probability of dropout in the outputs added to the hidden state.
    """

    differs: Mapping[str, Any] = field(default_factory=dict)
    dropout: str = "residual_dropout"


def read_layer(model: nn.Module, facts: LayerFacts, attention: AttentionSpec | Declined) -> LayerSpec | Declined:
    """Returns the spec of a definition's decoder layers, or the reason why Megatron's can't replace them.

    Args:
        attention: spec of their attention, or the reason why there is none.
    """
    config: Any = model.config
    reason = _why_not(config)
    if reason:
        return Declined(reason)
    if isinstance(attention, Declined):
        return attention
    layer = LayerSpec(attention, hidden_dropout=getattr(config, facts.dropout, 0.0), **facts.differs)
    layer = replace(layer, mlp=replace(layer.mlp, activation=ACTIVATIONS[_activation(config)]))
    paths = layers_with(attention, model)
    if reason := why_altered(model, paths, around=True):
        return Declined(reason)
    names = (*layer.norms, *attention.norms)
    epsilons = {norm_eps(model.get_submodule(f"{path}.{norm}")) for path in paths for norm in names}
    if len(epsilons) > 1:
        return Declined(f"norms of a layer have different epsilons: {', '.join(map(str, sorted(epsilons)))}")
    return replace(layer, attention=replace(attention, eps=epsilons.pop()))


def _activation(config: Any) -> str:
    """Returns HF's name of the MLP's activation."""
    fields = ("hidden_activation", "hidden_act", "activation_function")
    return next(getattr(config, name) for name in fields if getattr(config, name, None))


def _why_not(config: Any) -> str:
    if _activation(config) not in ACTIVATIONS:
        return f"the activation is {_activation(config)!r}, and Megatron's MLP is given {', '.join(ACTIVATIONS)}"
    return why_unwanted(config, WANTED)
