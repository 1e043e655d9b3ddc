"""Maps the parameters of Megatron's own modules to the HF tensors that they are made of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from megasched.language.module_specs import AttentionSpec, LayerSpec, MlaSpec, MlpSpec, MoeSpec
from megasched.plan.param_mapping import ParamMapping
from megasched.plan.placement import Placement
from megasched.plan.plan import Plan

# Megatron's names in its mixture of a router's weight and buffer, and of the weight of shared experts' gate.
ROUTER, CORRECTION, SHARED_GATE = "router.weight", "router.expert_bias", "shared_experts.gate_weight"
ROUTER_BIAS = "router.bias"
# The norm in what adds the output of attention or the MLP to the hidden state (``layer_modules.NormedAdd``).
POST_NORM = "norm"
# Logits in attention of a place without a value.
SINKS = "core_attention.softmax_offset"


def has_bias(plan: Plan, layer: str, name: str) -> bool:
    """Returns whether a linear of the definition's layer has a bias."""
    return f"{layer}.{name}.bias" in plan.canonical


def output_features(plan: Plan, layer: str, name: str) -> int:
    """Returns the number of output features of a linear of the definition's layer."""
    weight = plan.placement(f"{layer}.{name}", "weight")
    return weight.shape[1 if weight.transposed else 0]


def mixture_in(plan: Plan, layer: str) -> MoeSpec | None:
    """Returns the spec of the mixture of experts in a layer; None without a mixture or without a spec."""
    mixture = plan.roles.moe
    known = isinstance(mixture, MoeSpec) and f"{layer}.{mixture.router}.weight" in plan.canonical
    return mixture if known and isinstance(mixture, MoeSpec) else None


def mlp_of(block: LayerSpec, mixture: MoeSpec | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the input and output linears of the gated MLP that all tokens go through.

    In a mixture these are the linears of its shared experts, if it has any.
    """
    if mixture is None:
        return block.mlp.inputs, (block.mlp.down,)
    return mixture.shared_inputs, mixture.shared_outputs


def parameter_names(block: LayerSpec, mixture: MoeSpec | None) -> list[str]:
    """Returns the names of all parameters in a layer that its specs name; biases need not exist."""
    found = [f"{name}.{kind}" for name in block.norms for kind in ("weight", "bias")]
    found += attention_parameter_names(block.attention)
    return found + (mlp_parameter_names(block.mlp) if mixture is None else mixture_parameter_names(mixture))


def attention_parameter_names(attention: AttentionSpec) -> list[str]:
    """Returns the names of all parameters in a layer that the attention spec names; biases need not exist."""
    linears, latent = (*attention.inputs, attention.out), attention.mla
    norms = attention.norms if latent is None else (latent.q_norm, latent.kv_norm)
    found = [f"{name}.weight" for name in (*norms, *attention.whole, *linears)]
    found += [attention.sinks] if attention.sinks else []
    return [*found, *(f"{name}.bias" for name in (*norms, *linears) if latent is None)]


def mlp_parameter_names(mlp: MlpSpec) -> list[str]:
    """Returns the names of all parameters in a layer that the MLP spec names; biases need not exist."""
    return [f"{name}.{kind}" for name in (*mlp.inputs, mlp.down) for kind in ("weight", "bias")]


def mixture_parameter_names(mixture: MoeSpec) -> list[str]:
    """Returns the names of all parameters in a layer that the mixture spec names."""
    linears = (*whole_of_mixture(mixture), *mixture.shared_inputs, *mixture.shared_outputs)
    stacked = [f"{mixture.experts}.{name}" for name in mixture.expert.stacked.values()]
    biases = [f"{mixture.router}.bias"] if mixture.expert.biased else []
    return [*stacked, *biases, *(f"{name}.weight" for name in linears)]


def whole_of_mixture(mixture: MoeSpec) -> list[str]:
    """Returns the linears of a mixture that every TP rank holds whole: the router and the shared gate."""
    return [name for name in (mixture.router, mixture.shared_gate) if name]


def assemblies(plan: Plan, layer: str, ep_rank: int = 0) -> dict[str, ParamMapping]:
    """Maps the parameters of Megatron's ``TransformerLayer`` to the HF tensors that they are made of.

    A norm has two names: its own module's, and that of the Transformer Engine linear that fuses it. So has an
    expert: in a module for each expert, and in Transformer Engine's module for all.

    Args:
        ep_rank: EP rank whose experts are meant.
    """
    block = plan.roles.layer
    assert isinstance(block, LayerSpec)
    mixture = mixture_in(plan, layer)
    if mixture is None:
        mlp = mlp_assemblies(plan, layer, block.mlp)
    else:
        mlp = mixture_assemblies(plan, layer, mixture, ep_rank)
    attention = attention_assemblies(plan, layer, block.attention)
    return {
        **_norms(plan, layer, block),
        **{f"self_attention.{name}": assembly for name, assembly in attention.items()},
        **{f"mlp.{name}": assembly for name, assembly in mlp.items()},
    }


def attention_assemblies(plan: Plan, layer: str, attention: AttentionSpec) -> dict[str, ParamMapping]:
    """Maps the parameters of Megatron's ``SelfAttention`` or ``MLASelfAttention``; see ``assemblies``."""
    found = {"linear_proj.weight": _of(plan, layer, [f"{attention.out}.weight"])}
    if has_bias(plan, layer, attention.out):
        found["linear_proj.bias"] = _of(plan, layer, [f"{attention.out}.bias"])
    if attention.mla is not None:
        return found | _latent_projections(plan, layer, attention.mla)
    if attention.sinks:
        found[SINKS] = _of(plan, layer, [attention.sinks])
    norms = {"q_layernorm.": attention.q_norm, "k_layernorm.": attention.k_norm}
    return found | _projections(plan, layer, attention) | _of_norms(plan, layer, norms)


def mlp_assemblies(plan: Plan, layer: str, mlp: MlpSpec) -> dict[str, ParamMapping]:
    """Maps the parameters of Megatron's ``MLP``; see ``assemblies``."""
    linears = {"linear_fc1": mlp.inputs, "linear_fc2": (mlp.down,)}
    kinds = ("weight", "bias") if has_bias(plan, layer, mlp.down) else ("weight",)
    return {
        f"{own}.{kind}": _of(plan, layer, (f"{name}.{kind}" for name in names))
        for own, names in linears.items()
        for kind in kinds
    }


def mixture_assemblies(plan: Plan, layer: str, mixture: MoeSpec, ep_rank: int = 0) -> dict[str, ParamMapping]:
    """Maps the parameters of Megatron's ``MoELayer``; see ``assemblies``."""
    found = dict[str, ParamMapping]()
    if mixture.shared:
        fc1 = _of(plan, layer, (f"{name}.weight" for name in mixture.shared_inputs))
        fc2 = _of(plan, layer, (f"{name}.weight" for name in mixture.shared_outputs))
        found |= {"shared_experts.linear_fc1.weight": fc1, "shared_experts.linear_fc2.weight": fc2}
    for own, name in ((ROUTER, mixture.router), (SHARED_GATE, mixture.shared_gate)):
        if name:
            found[own] = ParamMapping((_of_part(plan, plan.placement(f"{layer}.{name}", "weight")),))
    if mixture.expert.biased:
        found[ROUTER_BIAS] = ParamMapping((_of_part(plan, plan.placement(f"{layer}.{mixture.router}", "bias")),))
    return found | _experts(plan, layer, mixture, ep_rank)


def _of(plan: Plan, layer: str, names: Iterable[str], groups: int = 1) -> ParamMapping:
    """Returns the mapping that joins parameters of a layer one after the other."""
    return ParamMapping(tuple(plan.placement(*f"{layer}.{name}".rsplit(".", 1)) for name in names), groups)


def _projections(plan: Plan, layer: str, attention: AttentionSpec) -> dict[str, ParamMapping]:
    """Maps the parameters of the projection to q, k and v."""
    qkv, groups = attention.inputs, 1 if attention.by_heads else attention.kv_heads
    kinds = ("weight", "bias") if has_bias(plan, layer, qkv[0]) else ("weight",)
    parts = {kind: _of(plan, layer, (f"{name}.{kind}" for name in qkv), groups) for kind in kinds}
    paired = attention.head_dim if attention.gated else 0
    return {f"linear_qkv.{kind}": replace(assembly, paired=paired) for kind, assembly in parts.items()}


def _norms(plan: Plan, layer: str, block: LayerSpec) -> dict[str, ParamMapping]:
    """Maps the parameters of the norms of the hidden state."""
    own = {
        "input_layernorm.": block.input_norm,
        "self_attention.linear_qkv.layer_norm_": block.input_norm,
        "pre_mlp_layernorm.": block.mlp_norm,
        "mlp.linear_fc1.layer_norm_": block.mlp_norm,
        f"self_attn_bda.{POST_NORM}.": block.attention_post_norm,
        f"mlp_bda.{POST_NORM}.": block.mlp_post_norm,
    }
    return _of_norms(plan, layer, own)


def _of_norms(plan: Plan, layer: str, own: Mapping[str, str]) -> dict[str, ParamMapping]:
    """Maps the parameters of norms; ``own`` is the prefix of their names in Megatron's module -> norm."""
    return {
        f"{prefix}{kind}": _of(plan, layer, [f"{norm}.{kind}"])
        for prefix, norm in own.items()
        for kind in ("weight", "bias")
        if norm and f"{layer}.{norm}.{kind}" in plan.canonical
    }


def _latent_projections(plan: Plan, layer: str, latent: MlaSpec) -> dict[str, ParamMapping]:
    """Maps the weights of the projections to compressed q, k and v and back, and of their norms."""
    whole = {
        "linear_q_down_proj.weight": latent.q_down,
        "q_layernorm.weight": latent.q_norm,
        "linear_q_up_proj.layer_norm_weight": latent.q_norm,
        "linear_kv_down_proj.weight": latent.kv_down,
        "kv_layernorm.weight": latent.kv_norm,
        "linear_kv_up_proj.layer_norm_weight": latent.kv_norm,
    }
    cut = {"linear_q_up_proj.weight": latent.q_up, "linear_kv_up_proj.weight": latent.kv_up}
    found = {own: _of_part(plan, plan.placement(f"{layer}.{name}", "weight")) for own, name in whole.items()}
    found |= {own: plan.placement(f"{layer}.{name}", "weight") for own, name in cut.items()}
    return {own: ParamMapping((placement,)) for own, placement in found.items()}


def _experts(plan: Plan, layer: str, mixture: MoeSpec, ep_rank: int) -> dict[str, ParamMapping]:
    """Maps the parameters of the experts that an EP rank holds; Megatron counts these from 0."""
    found, expert = {}, mixture.expert
    for parameter, name in expert.stacked.items():
        placement = plan.placement(f"{layer}.{mixture.experts}", name)
        stacked = placement if placement.group == "ep" else replace(_of_part(plan, placement), axis=0)
        count = plan.local_shape(placement)[0]
        transposed = expert.transposed and len(placement.shape) > 2
        interleaved = expert.interleaved and parameter.startswith("linear_fc1")
        for own in range(count):
            entry = ep_rank * count + own
            one = ParamMapping((stacked,), entry=entry, transposed=transposed, interleaved=interleaved)
            found[f"experts.local_experts.{own}.{parameter}"] = one
            found[f"experts.{parameter}{own}"] = one
    return found


def _of_part(plan: Plan, placement: Placement) -> Placement:
    """Returns the placement of a replicated parameter that a TP rank uses on its part of the sequence alone."""
    return replace(placement, tp_gradient="partial" if plan.layout.sp else "complete")
