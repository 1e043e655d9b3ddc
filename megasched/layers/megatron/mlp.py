"""Computes an MLP by Megatron's own ``MLP``, filled with the definition's weights."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core.activations import squared_relu
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn
from torch.nn import functional as F

from megasched.language.module_specs import MlpSpec
from megasched.layers.build_context import BuildContext
from megasched.layers.megatron.fill import fill_module
from megasched.layers.megatron.layer_spec import mlp_linears
from megasched.layers.te.attention import uses_transformer_engine
from megasched.layers.wrap import takes_any_name
from megasched.plan.megatron.params import has_bias, mlp_assemblies, output_features


class MegatronMlp(nn.Module):
    """Replaces the definition's MLP.

    Args:
        layer: Megatron's, which takes and returns [t (/ tp under SP), 1, h].
    """

    def __init__(self, layer: MLP) -> None:
        super().__init__()
        self.layer = layer

    @takes_any_name
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Maps [..., h] to [..., h].

        Tokens are independent, so their order does not matter; sequence parallelism gathers and scatters along the
        first dimension.
        """
        shape = hidden_states.shape
        output, bias = self.layer(hidden_states.reshape(-1, 1, shape[-1]))
        # No view, as autograd would let nobody change one in place that Megatron's functions have made, and Falcon
        # adds to it so; the tensor itself is nobody else's.
        return torch.ops.aten._unsafe_view(output if bias is None else output + bias, shape)


def lower_mlp(path: str, model: nn.Module, context: BuildContext) -> MegatronMlp:
    """Returns Megatron's MLP for the definition's at ``path``, filled with its values."""
    plan, structure = context.plan, context.plan.stack
    index = structure.index_of(path)
    assert index is not None
    layer, mlp = structure.layer_path(index), plan.mlps[path]
    config = context.config_with(
        **mlp_config(layer, mlp, context),
        hidden_size=output_features(plan, layer, mlp.down),
        add_bias_linear=has_bias(plan, layer, mlp.down),
        init_method=nn.init.zeros_,
        output_layer_init_method=nn.init.zeros_,
    )
    assert isinstance(config, TransformerConfig)
    groups = context.groups
    linears = mlp_linears(uses_transformer_engine(context.device))
    made = MLP(config, linears, ffn_hidden_size=config.ffn_hidden_size, tp_group=groups.tp)
    fill_module(path, made, mlp_assemblies(plan, layer, mlp), model, context)
    return MegatronMlp(made)


def mlp_config(layer: str, mlp: MlpSpec, context: BuildContext) -> dict[str, Any]:
    """Returns the fields of Megatron's config for HF's MLP in ``layer``, except for its biases.

    The trainer's flag enables fused kernels of the activation. Those of GELU are the tanh approximation, and need
    biases if there is no gate (``core/transformer/mlp.py``).
    """
    assert isinstance(context.config, TransformerConfig)
    tanh = mlp.activation == "gelu_tanh"
    biased = has_bias(context.plan, layer, mlp.down)
    has_kernel = (mlp.gated or biased) if tanh else (mlp.gated and mlp.activation == "silu")
    fused = context.config.bias_activation_fusion and has_kernel
    functions = {
        "silu": F.silu,
        "gelu": F.gelu,
        "gelu_tanh": F.gelu if fused else partial(F.gelu, approximate="tanh"),
        "relu": F.relu,
        "squared_relu": squared_relu,
    }
    return {
        "ffn_hidden_size": _inputs(mlp.down, layer, context),
        "num_moe_experts": None,
        "moe_ffn_hidden_size": None,
        "gated_linear_unit": mlp.gated,
        "activation_func": functions[mlp.activation],
        "bias_activation_fusion": fused,
    }


def _inputs(linear: str, layer: str, context: BuildContext) -> int:
    weight = context.plan.placement(f"{layer}.{linear}", "weight")
    return weight.shape[0 if weight.transposed else 1]
