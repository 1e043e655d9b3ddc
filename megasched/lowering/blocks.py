"""Which decoder layers Megatron's own ``TransformerLayer`` computes, and what its parameters are made of."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from megasched.assembly import Assembly
from megasched.errors import Problem
from megasched.experts import find_experts
from megasched.lowering.joining import level_at, levels_asked, required
from megasched.lowering.plan import Plan
from megasched.placement import Placement
from megasched.records import Record
from megasched.roles import Block, Cut, Mixture

if TYPE_CHECKING:
    from torch import nn

# Megatron's names in its layer of a router's weight and buffer, and of the weight of shared experts' gate.
ROUTER, CORRECTION, SHARED_GATE = "mlp.router.weight", "mlp.router.expert_bias", "mlp.shared_experts.gate_weight"

# Calls on the layer itself are carried out on what takes its place; nothing inside it is left to call.
_INSIDE = ("shard", "level")


def choose_blocks(plan: Plan, block: Block | str, trained: Mapping[str, bool], by_trainer: bool) -> list[Problem]:
    """Fills ``plan.blocks`` with the layers at level ``block``; a problem for each that can't be and must.

    Args:
        block: how the definition's layers are put together, or why that is not known.
        trained: canonical parameter name -> ``requires_grad``.
        by_trainer: the model is built for Megatron's trainer, whose config its layers need.
    """
    levels = levels_asked(plan)
    asked = {path: record for path, record in levels.items() if record.arguments["name"] == "block"}
    if not asked:
        return []
    if plan.structure is None or not by_trainer:
        what = "Megatron's layers need the config of its trainer"
        remedy = "train through `python -m megasched pretrain_gpt.py`, or use level('fused')"
        return [Problem(what, path, r.source, remedy) for path, r in asked.items() if required(r)]
    layers = plan.structure.layer_paths()
    problems = []
    chosen = {}
    for layer in layers:
        record = level_at(levels, layer)
        if record is not None and record.arguments["name"] == "block":
            chosen[layer] = record
    for path, record in asked.items():
        if plan.structure.index_of(path) is not None and path not in layers:
            what = "a block is a whole decoder layer"
            problems.append(Problem(what, path, record.source, "call level('block') on the layer"))
    inside = _Inside(plan)
    for layer, record in chosen.items():
        reason = block if isinstance(block, str) else _why_not(plan, layer, block, trained, inside)
        if not reason:
            plan.blocks.add(layer)
        elif required(record):
            what = f"Megatron's layer can't stand for this one: {reason}"
            problems.append(Problem(what, layer, record.source, "use level('fused') here"))
        else:
            plan.not_blocks[layer] = reason
    return problems


def overlap_problems(plan: Plan) -> list[Problem]:
    """A problem for each layer that does not overlap its communication as ``--tp-comm-overlap`` asks."""
    structure = plan.structure
    if not plan.layout.tp_comm_overlap or structure is None:
        return []
    layers = structure.layer_paths()
    what = "--tp-comm-overlap: only Megatron's own layers overlap communication with their products"
    remedy = "call level('block') on the layer, where the model has it, or leave the flag out"
    return [Problem(what, layer, remedy=remedy) for layer in layers if layer not in plan.blocks]


def mixture_problems(plan: Plan, model: nn.Module, block: Block | str) -> list[Problem]:
    """A problem for each mixture that is not Megatron's own where its flags ask for that."""
    flags, structure = plan.layout.mixture_flags, plan.structure
    if not flags or structure is None:
        return []
    what = f"{', '.join(flags)}: Megatron's own mixtures of experts do that"
    layers = dict.fromkeys(structure.index_of(path) for path in find_experts(model))
    mixed = [structure.layer_path(index) for index in layers if index is not None]
    if not mixed:
        none = f"{what}, and the model has none of the form that HF gives experts"
        return [Problem(none, remedy="leave it out")]
    remedy = "leave it out, or call level('block') on the layer, where the model has it"
    problems = []
    for layer in mixed:
        if layer not in plan.blocks:
            reason = plan.not_blocks.get(layer, "")
            problems.append(Problem(f"{what}, and not this one{reason and f': {reason}'}", layer, remedy=remedy))
    corrected = isinstance(block, Block) and block.mixture is not None and bool(block.mixture.correction)
    bias = "--moe-router-enable-expert-bias"
    if bias in flags and not problems and not corrected:
        problems.append(Problem(f"{bias}: the definition's routers choose without a bias", remedy="leave it out"))
    return problems


class _Inside:
    """Layer -> names of the parameters in it, and the calls on modules in it."""

    def __init__(self, plan: Plan) -> None:
        structure = plan.structure
        assert structure is not None
        self.names: dict[str, list[str]] = defaultdict(list)
        self.records: dict[str, list[Record]] = defaultdict(list)
        for name in plan.canonical:
            index = structure.index_of(name)
            if index is not None:
                self.names[structure.layer_path(index)].append(name)
        for record in plan.records:
            index = structure.index_of(record.path)
            layer = "" if index is None else structure.layer_path(index)
            apart = layer != record.path or record.primitive in ("trace", "trace_until")
            if apart and record.primitive not in _INSIDE:
                self.records[layer].append(record)


def _why_not(plan: Plan, layer: str, block: Block, trained: Mapping[str, bool], inside: _Inside) -> str:
    mixture = mixture_of(plan, layer, block)
    if mixture is not None and plan.layout.tp > 1 and not plan.layout.sp:
        return "its mixture of experts wants sequence parallelism where there are TP ranks"
    if block.latent is not None and plan.layout.tp > 1 and not plan.layout.sp:
        return "its latent attention wants sequence parallelism where there are TP ranks"
    mlp_inputs, mlp_outputs = mlp_of(block, mixture)
    inputs, outputs = (*block.attention_inputs, *mlp_inputs), (block.out, *mlp_outputs)
    wanted: dict[str, Cut] = {**dict.fromkeys(inputs, "column"), **dict.fromkeys(outputs, "row")}
    for name, cut in wanted.items():
        path = f"{layer}.{name}"
        if plan.cuts.get(path) != cut or path in plan.derived.gather or path in plan.derived.scatter:
            return f"{name} is not sharded as a {cut}"
        if path in plan.replicated_heads:
            return f"there are more TP ranks than heads of {name}"
    for record in inside.records[layer]:
        what = record.path[len(layer) + 1 :] or "the layer"
        return f"the schedule calls {record.primitive} on {what}, which is gone then"
    names = inside.names[layer]
    known = {f"{layer}.{name}" for name in _parameters(block, mixture)}
    strange = [name[len(layer) + 1 :] for name in names if name not in known]
    if strange:
        return f"nothing is known of {', '.join(strange)}"
    for name in _whole(block, mixture):
        if plan.placement(f"{layer}.{name}", "weight").sharded:
            return f"{name} is sharded"
    reason = _uneven_biases(plan, layer, block)
    if reason:
        return reason
    if any(plan.canonical[name] != name for name in names):
        return "a parameter is tied to one of another layer"
    for parts in assemblies(plan, layer, block).values():
        if len({trained[part.name] for part in parts.parts}) > 1:
            return f"only some of {parts.name} are trained"
    return ""


def _uneven_biases(plan: Plan, layer: str, block: Block) -> str:
    """What of a layer's biases Megatron's has not."""
    first = block.attention_inputs
    inputs, outputs = mlp_of(block, mixture_of(plan, layer, block))
    for names in (first, (*inputs, *outputs)):
        if len({has_bias(plan, layer, name) for name in names}) > 1:
            return f"only some of {', '.join(names)} have a bias"
    if has_bias(plan, layer, block.out) and not has_bias(plan, layer, first[0]):
        return f"{block.out} has a bias and {first[0]} has none"
    return ""


def has_bias(plan: Plan, layer: str, name: str) -> bool:
    """Whether a linear of the definition's layer has one."""
    return f"{layer}.{name}.bias" in plan.canonical


def mixture_of(plan: Plan, layer: str, block: Block) -> Mixture | None:
    """The mixture of experts in a layer; None where it has an MLP."""
    mixture = block.mixture
    return mixture if mixture is not None and f"{layer}.{mixture.router}.weight" in plan.canonical else None


def mlp_of(block: Block, mixture: Mixture | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Linears in a layer of the gated MLP that all tokens go through, and have an input or an output of; of a
    mixture, those of its shared experts, if it has any."""
    if mixture is None:
        return block.mlp_inputs, (block.down,)
    if not mixture.shared:
        return (), ()

    def of(name: str) -> str:
        return f"{mixture.shared}.{name.rpartition('.')[2]}"

    return tuple(map(of, block.mlp_inputs)), (of(block.down),)


def _parameters(block: Block, mixture: Mixture | None) -> list[str]:
    """Names in a layer of all that the block speaks of; biases need not be there."""
    inputs, outputs = mlp_of(block, mixture)
    attention = (*block.attention_inputs, block.out)
    norms = [block.input_norm, block.mlp_norm, block.q_norm, block.k_norm]
    norms += [block.latent.q_norm, block.latent.kv_norm] if block.latent is not None else []
    found = [] if mixture is None else [f"{mixture.experts}.{name}" for name in _STACKED.values()]
    names = (*norms, *_whole(block, mixture), *attention, *inputs, *outputs)
    found += [f"{name}.weight" for name in names if name]
    biased = () if block.latent is not None else attention
    biased = biased if mixture is not None else (*biased, *inputs, *outputs)
    return [*found, *(f"{name}.bias" for name in biased)]


def _whole(block: Block, mixture: Mixture | None) -> list[str]:
    """Linears of a layer that every TP rank has whole."""
    found = [] if mixture is None else [mixture.router, mixture.shared_gate]
    found += [] if block.latent is None else [block.latent.q_down, block.latent.kv_down]
    return [name for name in found if name]


def assemblies(plan: Plan, layer: str, block: Block, ep_rank: int = 0) -> dict[str, Assembly]:
    """Parameter of Megatron's ``TransformerLayer`` -> HF tensors. Norms have two names: their own module's, and
    that of Transformer Engine's linear that has the norm in it; experts, that of a module for each and that of
    Transformer Engine's for all.

    Args:
        ep_rank: which experts are meant.
    """

    def of(names: Iterable[str]) -> Assembly:
        return Assembly(tuple(plan.placement(*f"{layer}.{name}".rsplit(".", 1)) for name in names))

    mixture = mixture_of(plan, layer, block)
    fc1, fc2 = mlp_of(block, mixture)
    found = {
        "input_layernorm.weight": of([f"{block.input_norm}.weight"]),
        "pre_mlp_layernorm.weight": of([f"{block.mlp_norm}.weight"]),
        "self_attention.linear_proj.weight": of([f"{block.out}.weight"]),
        **(_attention if block.latent is None else _latent_attention)(plan, layer, block),
    }
    if fc1:
        mlp = "mlp" if mixture is None else "mlp.shared_experts"
        found[f"{mlp}.linear_fc1.weight"] = of(f"{name}.weight" for name in fc1)
        found[f"{mlp}.linear_fc2.weight"] = of(f"{name}.weight" for name in fc2)
    if mixture is None:
        found["mlp.linear_fc1.layer_norm_weight"] = of([f"{block.mlp_norm}.weight"])
    else:
        for own, name in ((ROUTER, mixture.router), (SHARED_GATE, mixture.shared_gate)):
            if name:
                found[own] = Assembly((_of_part(plan, plan.placement(f"{layer}.{name}", "weight")),))
        found |= _experts(plan, f"{layer}.{mixture.experts}", ep_rank)
    if has_bias(plan, layer, block.out):
        found["self_attention.linear_proj.bias"] = of([f"{block.out}.bias"])
    if mixture is None and has_bias(plan, layer, fc1[0]):
        found["mlp.linear_fc1.bias"] = of(f"{name}.bias" for name in fc1)
        found["mlp.linear_fc2.bias"] = of(f"{name}.bias" for name in fc2)
    return found


def _attention(plan: Plan, layer: str, block: Block) -> dict[str, Assembly]:
    """Of Megatron's ``SelfAttention``, but for its output projection."""

    def of(names: Iterable[str], parameter: str, groups: int = 1) -> Assembly:
        return Assembly(tuple(plan.placement(f"{layer}.{name}", parameter) for name in names), groups)

    qkv = block.attention_inputs
    found = {
        "self_attention.linear_qkv.weight": of(qkv, "weight", block.groups),
        "self_attention.linear_qkv.layer_norm_weight": of([block.input_norm], "weight"),
    }
    if has_bias(plan, layer, qkv[0]):
        found["self_attention.linear_qkv.bias"] = of(qkv, "bias", block.groups)
    if block.q_norm:
        found["self_attention.q_layernorm.weight"] = of([block.q_norm], "weight")
        found["self_attention.k_layernorm.weight"] = of([block.k_norm], "weight")
    return found


def _latent_attention(plan: Plan, layer: str, block: Block) -> dict[str, Assembly]:
    """Of Megatron's ``MLASelfAttention``, but for its output projection."""
    latent = block.latent
    assert latent is not None
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
    return {f"self_attention.{own}": Assembly((placement,)) for own, placement in found.items()}


# Megatron's linear of an expert -> HF's parameter of all.
_STACKED = {"linear_fc1": "gate_up_proj", "linear_fc2": "down_proj"}


def _experts(plan: Plan, path: str, ep_rank: int) -> dict[str, Assembly]:
    """Of the experts that an EP rank has, which Megatron counts from 0."""
    found = {}
    for linear, name in _STACKED.items():
        placement = plan.placement(path, name)
        stacked = placement if placement.group == "ep" else replace(_of_part(plan, placement), axis=0)
        count = plan.local_shape(placement)[0]
        for own in range(count):
            one = Assembly((stacked,), entry=ep_rank * count + own)
            found[f"mlp.experts.local_experts.{own}.{linear}.weight"] = one
            found[f"mlp.experts.{linear}.weight{own}"] = one
    return found


def _of_part(plan: Plan, placement: Placement) -> Placement:
    """Of a parameter that every TP rank has, and uses for its part of the sequence alone."""
    return replace(placement, tp_gradient="partial" if plan.layout.sp else "complete")
