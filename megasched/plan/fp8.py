"""Decides which layers and weights Transformer Engine computes in 8 bits, and checks their sizes."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from torch import nn

from megasched.definition.linears import is_linear
from megasched.errors import Problem
from megasched.language.lora import adapted, adapter_names
from megasched.language.module_specs import AttentionSpec, MoeSpec
from megasched.plan.megatron.params import (
    ROUTER,
    SHARED_GATE,
    assemblies,
    attention_assemblies,
    mixture_assemblies,
    mlp_assemblies,
)
from megasched.plan.param_mapping import ParamMapping
from megasched.plan.plan import Plan


def choose_fp8(plan: Plan) -> tuple[Plan, list[Problem]]:
    """Returns the plan with its 8-bit linears and weights, and a problem for each layer that can't have them.

    Args:
        plan: complete except for the 8-bit choice.
    """
    fp8, structure, roles = plan.layout.fp8, plan.structure, plan.roles
    if fp8 is None:
        return plan, []
    if structure is None:
        return plan, [Problem("8-bit training is for Megatron's trainer", remedy="a layout without fp8")]
    problems, mlps = [], defaultdict(list)
    te_linears, in_8_bits = set[str](), set[str]()
    for path, mlp in plan.mlps.items():
        mlps[structure.index_of(path)].append(mlp)
    for index in range(structure.count):
        layer = structure.layer_path(index)
        if not plan.in_8_bits(layer):
            continue
        if layer in plan.blocks:
            products = _weights(plan, assemblies(plan, layer))
        else:
            linears = _linears(plan, index)
            te_linears.update(linears)
            products = _products(plan, linears)
            if isinstance(roles.moe, MoeSpec) and f"{layer}.{roles.moe.module}" in plan.mixtures:
                products += _weights(plan, mixture_assemblies(plan, layer, roles.moe))
            if (
                isinstance(roles.attention, AttentionSpec)
                and f"{layer}.{roles.attention.module}" in plan.attentions
            ):
                products += _weights(plan, attention_assemblies(plan, layer, roles.attention))
            for mlp in mlps[index]:
                products += _weights(plan, mlp_assemblies(plan, layer, mlp))
        if not products:
            what = "none of its linears is sharded, so that none would run in 8 bits"
            remedy = "shard them, at one TP rank too, or call level('block') on the layer"
            problems.append(Problem(what, layer, remedy=remedy))
        problems += _misfits(plan, layer, products)
        in_8_bits.update(part.name for product in products for part in product.parts)
    return replace(plan, te_linears=frozenset(te_linears), weights_in_8_bits=frozenset(in_8_bits)), problems


def _weights(plan: Plan, made: dict[str, ParamMapping]) -> list[ParamMapping]:
    """Returns the matrices that Megatron's modules multiply in 8 bits; experts in one tensor count once."""
    found = {product.name: product for name, product in made.items() if not name.endswith((ROUTER, SHARED_GATE))}
    return [product for product in found.values() if len(product.local_shape(plan.layout.tp)) == 2]


def left_in_16_bits(plan: Plan, model: nn.Module) -> list[str]:
    """Returns linears of 8-bit layers that stay in 16 bits, such as unsharded ones and replicated k and v."""
    return [
        path
        for path, module in model.named_modules()
        if is_linear(module) and plan.in_8_bits(path) and not plan.in_block(path) and path not in plan.te_linears
    ]


def _linears(plan: Plan, index: int) -> list[str]:
    """Returns the cut linears of a layer that Transformer Engine computes in 8 bits.

    These stay in 16 bits: projections to k and v with fewer heads than TP ranks, linears that hand whole tensors
    on inside a region, linears whose output is changed in place, and adapters.
    """
    tp_facts = plan.tp_facts
    whole_inside = (
        tp_facts.rows_inside
        | tp_facts.overwritten
        | (tp_facts.inside & (tp_facts.gather.keys() | tp_facts.scatter))
    )
    adapters = {name.removesuffix(".weight") for name in adapter_names(adapted(plan.records))}
    apart = whole_inside.union(plan.replicated_heads, adapters)
    return [
        path
        for path, cut in plan.cuts.items()
        if cut in ("column", "row")
        and path not in apart
        and plan.stack.index_of(path) == index
        and not plan.in_block(path)
    ]


def _products(plan: Plan, linears: list[str]) -> list[ParamMapping]:
    """Returns the weights of each matrix product of these linears; fused columns have one product."""
    groups = {paths[0]: paths for paths in plan.fused_columns if paths[0] in linears}
    later = {path for paths in groups.values() for path in paths[1:]}
    return [
        ParamMapping(tuple(plan.placement(member, "weight") for member in groups.get(path, (path,))))
        for path in linears
        if path not in later
    ]


def _misfits(plan: Plan, layer: str, products: list[ParamMapping]) -> list[Problem]:
    """Returns a problem for each weight with a shape on one rank that no 8-bit matrix product takes."""
    fp8 = plan.layout.fp8
    assert fp8 is not None
    problems = []
    for product in products:
        shape = product.local_shape(plan.layout.tp)
        if any(size % fp8.multiple for size in shape):
            names = " + ".join(part.name.removeprefix(f"{layer}.") for part in product.parts)
            what = f"{names} is {list(shape)} on each of {plan.layout.tp} TP ranks, and an 8-bit matrix product "
            what += f"({fp8.fp8_recipe}) takes multiples of {fp8.multiple}"
            remedy = "a smaller tensor parallel size, other sizes, or training in bf16"
            problems.append(Problem(what, layer, remedy=remedy))
    return problems
