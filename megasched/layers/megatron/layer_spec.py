"""Chooses the submodules of a Megatron ``TransformerLayer`` that replaces a definition's layer.

They are Transformer Engine's if it is used, else Megatron's own with torch's norms and attention.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TENorm, TERowParallelLinear
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_submodules,
    get_gpt_layer_with_transformer_engine_submodules,
)
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules
from torch import nn
from torch.nn import functional as F

from megasched.language.module_specs import LayerSpec
from megasched.layers.build_context import BuildContext
from megasched.layers.megatron.core_attention import CoreAttention
from megasched.plan.megatron.params import POST_NORM

# (config, hidden_size, eps) -> norm
Norm = Callable[..., nn.Module]


def layer_submodules(
    block: LayerSpec, config: TransformerConfig, context: BuildContext, mlp_bias: bool, te: bool
) -> TransformerLayerSubmodules:
    """Returns the submodules of a layer with this config.

    Args:
        mlp_bias: the MLP has biases; the config's flag is for attention.
        te: the submodules are Transformer Engine's.
    """
    norm = _norms(context, te)
    submodules = _made_of(config, context, te)
    if not block.input_norm:
        submodules.input_layernorm = IdentityOp
        _without_norm(submodules.self_attention, config, te)
    if not block.mlp_norm:
        _without_mlp_norm(submodules, config, te)
    build, other = submodules.mlp, copy.copy(config)
    other.add_bias_linear = mlp_bias  # Megatron's one flag speaks of attention and MLP

    def mlp(config: TransformerConfig, **kwargs: Any) -> nn.Module:
        return build(config=other, **kwargs)

    submodules.mlp = mlp
    for name, post_norm in (("self_attn_bda", block.attention_post_norm), ("mlp_bda", block.mlp_post_norm)):
        if post_norm:
            made = partial(norm, config, config.hidden_size, config.layernorm_epsilon)
            setattr(submodules, name, ModuleSpec(NormedAdd, params={POST_NORM: made}))
    return submodules


def _norms(context: BuildContext, te: bool) -> Norm:
    return TENorm if te else partial(_norm, context.device)


def _made_of(config: TransformerConfig, context: BuildContext, te: bool) -> TransformerLayerSubmodules:
    return _of_transformer_engine(config) if te else _of_torch(config, context, _norms(context, te))


def _of_transformer_engine(config: TransformerConfig) -> TransformerLayerSubmodules:
    return get_gpt_layer_with_transformer_engine_submodules(
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=config.moe_grouped_gemm,
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=config.multi_latent_attention,
    )


def _of_torch(config: TransformerConfig, context: BuildContext, norm: Norm) -> TransformerLayerSubmodules:
    submodules = get_gpt_layer_local_submodules(
        num_experts=config.num_moe_experts,
        qk_layernorm=config.qk_layernorm,
        normalization=config.normalization,
        multi_latent_attention=config.multi_latent_attention,
    )
    submodules.input_layernorm = submodules.pre_mlp_layernorm = norm
    inner = submodules.self_attention.submodules
    options = {"ranks": context.context_parallel, "device": context.device}
    inner.core_attention = partial(CoreAttention, **options)
    if config.multi_latent_attention:
        inner.core_attention = ModuleSpec(CoreAttention, params=options)
        inner.q_layernorm = inner.kv_layernorm = norm
    elif config.qk_layernorm:
        inner.q_layernorm = inner.k_layernorm = norm
    return submodules


def attention_spec(config: TransformerConfig, context: BuildContext, te: bool) -> ModuleSpec:
    """Returns the spec of attention without a norm before it, in a layer that has no experts."""
    submodules = _made_of(config, context, te)
    _without_norm(submodules.self_attention, config, te)
    return submodules.self_attention


def _without_norm(attention: ModuleSpec, config: TransformerConfig, te: bool) -> None:
    """Removes the norm before attention from its projection.

    Transformer Engine's fused projection includes the norm; that of latent attention does not.
    """
    if te and not config.multi_latent_attention:
        attention.submodules.linear_qkv = TEColumnParallelLinear


def _without_mlp_norm(submodules: TransformerLayerSubmodules, config: TransformerConfig, te: bool) -> None:
    submodules.pre_mlp_layernorm = IdentityOp
    if te and config.num_moe_experts is None:
        submodules.mlp = partial(MLP.as_mlp_submodule, submodules=mlp_linears(te))


def mlp_linears(te: bool) -> MLPSubmodules:
    """Returns the linears of an MLP without a norm before it."""
    if te:
        return MLPSubmodules(linear_fc1=TEColumnParallelLinear, linear_fc2=TERowParallelLinear)
    return MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)


class NormedAdd(nn.Module):
    """Replaces Megatron's bias-dropout-add, and normalises the output of attention or MLP before it is added.

    It stands in for ``get_bias_dropout_add`` (``core/fusions/fused_bias_dropout.py``).

    Args:
        norm: makes the norm.
    """

    def __init__(self, norm: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.norm = norm()

    def forward(self, training: bool, fused: bool) -> Callable[..., torch.Tensor]:
        """Returns the function of ((output, its bias or None), hidden state, probability of dropout)."""
        add = get_bias_dropout_add(training, fused)

        def normed_add(
            output: tuple[torch.Tensor, torch.Tensor | None], residual: torch.Tensor, dropout: float
        ) -> torch.Tensor:
            x, bias = output
            return add((self.norm(x if bias is None else x + bias), None), residual, dropout)

        return normed_add


def _norm(device: torch.device, config: TransformerConfig, hidden_size: int, eps: float) -> nn.Module:
    """Returns a norm that runs torch's kernels."""
    plain, zero_centered = {
        "RMSNorm": (nn.RMSNorm, ZeroCenteredRMSNorm),
        "LayerNorm": (nn.LayerNorm, ZeroCenteredLayerNorm),
    }[config.normalization]
    kind = zero_centered if config.layernorm_zero_centered_gamma else plain
    return kind(hidden_size, eps=eps, dtype=config.params_dtype, device=device)


class ZeroCenteredRMSNorm(nn.RMSNorm):
    """Computes an RMS norm that stores its weight minus 1, and uses it in float32 like Transformer Engine."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.float(), self.normalized_shape, 1 + self.weight.float(), self.eps).type_as(x)


class ZeroCenteredLayerNorm(nn.LayerNorm):
    """Computes a layer norm that stores its weight minus 1."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, self.normalized_shape, self.weight + 1, self.bias, self.eps)
