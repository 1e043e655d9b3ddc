"""Computes a mixture of experts by Megatron's own ``MoELayer``, filled with the definition's weights."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.activations import squared_relu
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn
from torch.nn import functional as F

from megasched.language.module_specs import ExpertSpec, MoeSpec
from megasched.layers.build_context import BuildContext
from megasched.layers.megatron.fill import fill_module
from megasched.layers.te.attention import uses_transformer_engine
from megasched.layers.wrap import takes_any_name
from megasched.plan.megatron.params import CORRECTION, mixture_assemblies


class MegatronMixture(nn.Module):
    """Replaces the definition's module of router and experts.

    Args:
        layer: Megatron's, which takes and returns [s (/ tp under SP), b, h].
        mixture: says what the definition's returns.
    """

    def __init__(self, layer: MoELayer, mixture: MoeSpec) -> None:
        super().__init__()
        self.layer, self.flat, self.with_scores = layer, mixture.flat, mixture.with_scores

    @takes_any_name
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, None]:
        """Maps [b, s (/ tp under SP), h] to the same, or to its first two dimensions as one; for scores, None."""
        output, _ = self.layer(hidden_states.transpose(0, 1).contiguous())
        hidden = output.transpose(0, 1)
        hidden = hidden.flatten(0, 1) if self.flat else hidden
        return (hidden, None) if self.with_scores else hidden


def lower_mixture(path: str, model: nn.Module, mixture: MoeSpec, context: BuildContext) -> MegatronMixture:
    """Returns Megatron's mixture for the definition's at ``path``, filled with its values."""
    plan, structure = context.plan, context.plan.stack
    index = structure.index_of(path)
    assert index is not None
    layer, groups = structure.layer_path(index), context.groups
    config = context.config_with(
        **moe_config(layer, mixture, context),
        hidden_size=plan.placement(f"{layer}.{mixture.router}", "weight").shape[1],
        init_method=nn.init.zeros_,
        output_layer_init_method=nn.init.zeros_,
    )
    te = uses_transformer_engine(context.device)
    build = get_moe_module_spec(te, config.num_moe_experts, moe_grouped_gemm=te)
    made = build(config=config, pg_collection=groups, is_mtp_layer=False)
    made.set_layer_number(index + 1)
    configure_moe(made, mixture, te)
    known = mixture_assemblies(plan, layer, mixture, groups.ep.rank())
    fill_module(path, made, known, model, context)
    note_correction(f"{path}.layer", layer, mixture, context)
    return MegatronMixture(made, mixture)


def configure_moe(made: Any, mixture: MoeSpec, te: bool) -> None:
    """Prepares a new mixture of Megatron's for experts with biases, and for router weights in float32.

    Args:
        te: its experts are Transformer Engine's.
    """
    made.router.register_forward_pre_hook(_as_its_weight)
    for expert in made.experts.local_experts if mixture.expert.biased and not te else ():
        expert.linear_fc2.register_forward_hook(_changeable)


def _changeable(linear: nn.Module, arguments: Any, output: tuple[torch.Tensor, Any]) -> tuple[torch.Tensor, Any]:
    """Returns a clone of an expert's output, so that it can be changed in place.

    Megatron's ``MLP`` adds the expert's bias in place (megatron/core/transformer/mlp.py:354); autograd takes the
    output for a view if a group of one rank has reduced nothing. Transformer Engine's experts do not add in place.
    """
    return output[0].clone(), output[1]


def _as_its_weight(router: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Casts the router's input to the dtype of its weight.

    GPUs have no matrix product of a float32 weight with half precision, which the router would call.
    """
    return (arguments[0].to(router.weight.dtype), *arguments[1:])


def note_correction(made: str, layer: str, mixture: MoeSpec, context: BuildContext) -> None:
    """Registers the definition's name for the correction buffer of Megatron's mixture at ``made``."""
    if mixture.correction:
        context.renamed_buffers[f"{made}.{CORRECTION}"] = f"{layer}.{mixture.correction}"


def moe_config(layer: str, mixture: MoeSpec, context: BuildContext) -> dict[str, Any]:
    """Returns the fields of Megatron's config for HF's mixture of experts in ``layer``; no token is dropped.

    Losses, dispatcher and fusions follow the trainer's flags.
    """
    plan, trainer = context.plan, context.config
    assert isinstance(trainer, TransformerConfig)
    flex = trainer.moe_token_dispatcher_type == "flex"
    count, *sizes = plan.placement(f"{layer}.{mixture.experts}", "down_proj").shape
    width = sizes[0 if mixture.expert.transposed else 1]
    shared = mixture.shared_outputs
    sigmoid, grouped = mixture.scores == "sigmoid", mixture.expert_groups > 1
    return {
        **_expert_config(mixture.expert, trainer),
        "num_moe_experts": count,
        "moe_ffn_hidden_size": width,
        "ffn_hidden_size": width,
        "moe_router_topk": mixture.top_k,
        "moe_router_score_function": mixture.scores,
        "moe_apply_probs_on_input": mixture.weighted_inputs,
        "moe_router_pre_softmax": not (sigmoid or mixture.normalized),
        "moe_router_dtype": trainer.moe_router_dtype or ("fp32" if mixture.float32 else None),
        "moe_router_enable_expert_bias": bool(mixture.correction),
        "moe_router_num_groups": mixture.expert_groups if grouped else None,
        "moe_router_group_topk": mixture.group_top_k if grouped else None,
        "moe_router_topk_scaling_factor": None if mixture.scale == 1 else mixture.scale,
        "moe_router_load_balancing_type": trainer.moe_router_load_balancing_type
        if trainer.moe_aux_loss_coeff
        else "none",
        "moe_token_dispatcher_type": "flex" if flex else "alltoall",
        "moe_grouped_gemm": True,
        "moe_shared_expert_intermediate_size": plan.placement(f"{layer}.{shared[0]}", "weight").shape[1]
        if shared
        else None,
        "moe_shared_expert_gate": bool(mixture.shared_gate),
        "expert_tensor_parallel_size": 1,
    }


def _expert_config(expert: ExpertSpec, trainer: TransformerConfig) -> dict[str, Any]:
    functions = {"swiglu": F.silu, "squared_relu": squared_relu, "quick_geglu": quick_gelu}
    return {
        "gated_linear_unit": expert.gated,
        "activation_func": functions[expert.activation],
        # Megatron has no fused kernel for what has no gate; its own flag for one stands beside this.
        "bias_activation_fusion": trainer.bias_activation_fusion and expert.gated,
        "activation_func_clamp_value": expert.limit,
        "glu_linear_offset": expert.offset,
        "add_bias_linear": expert.biased,
        # Not of experts; with their biases Transformer Engine's would refuse it.
        "bias_dropout_fusion": trainer.bias_dropout_fusion and not expert.biased,
    }
