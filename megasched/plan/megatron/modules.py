"""Decides for which modules of a definition Megatron's own modules stand in.

A decoder layer may become a ``TransformerLayer``. In other layers attention may become a ``SelfAttention``, a
mixture of experts a ``MoELayer`` and an MLP an ``MLP``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from torch import nn

from megasched.definition.experts import find_experts
from megasched.errors import Declined, Problem
from megasched.language.module_specs import AttentionSpec, LayerSpec, MlpSpec, MoeSpec
from megasched.language.records import Record
from megasched.plan.fused_columns import level_at, levels_asked, required
from megasched.plan.megatron.fit import MakeTrials, MegatronCandidate, MegatronFit
from megasched.plan.plan import Plan


def choose_megatron_modules(
    plan: Plan, model: nn.Module, *, by_trainer: bool, trials: MakeTrials | None
) -> tuple[Plan, list[Problem]]:
    """Returns the plan with the modules at level ``block`` that are Megatron's, and the problems.

    A module at a required ``block`` that can't be Megatron's is a problem.

    Args:
        by_trainer: the model is built for Megatron's trainer, whose config its layers need.
        trials: makes the trials that compare Megatron's modules with the definition's; without it only MLPs are
            chosen.
    """
    levels = levels_asked(plan)
    asked = {path: record for path, record in levels.items() if record.arguments["name"] == "block"}
    if not asked:
        return plan, []
    structure = plan.structure
    if structure is None or not by_trainer:
        what = "Megatron's layers need the config of its trainer"
        remedy = "train through `python -m megasched pretrain_gpt.py`, or use level('fused')"
        return plan, [Problem(what, path, r.source, remedy) for path, r in asked.items() if required(r)]
    parts = _parts(plan, model)
    why_not = MegatronFit(plan, model, parts, trials)
    problems, declined = [], dict[str, Declined]()
    for path, record in asked.items():
        inside = structure.index_of(path) is not None
        if path not in parts and (inside or (required(record) and not _holds(path, parts))):
            what = "a block is a whole decoder layer, its attention, its mixture of experts or its MLP"
            problems.append(Problem(what, path, record.source, "call level('block') on one of them"))
    for path, part in parts.items():
        level = level_at(levels, path)
        if level is None or level.arguments["name"] != "block" or _settled(plan, path, part, level):
            continue
        reason = why_not(path, part)
        if not reason:
            plan = _take(plan, path, part)
        elif required(level):
            what = f"Megatron's {part.kind} can't stand for this one: {reason}"
            problems.append(Problem(what, path, level.source, "use level('fused') here"))
        else:
            declined[path] = Declined(reason, path, level.source)
    return replace(plan, declined=declined), problems


def _holds(path: str, parts: Iterable[str]) -> bool:
    """Returns whether one of the modules is inside the module at a path."""
    return any(part.startswith(f"{path}." if path else "") for part in parts)


def _parts(plan: Plan, model: nn.Module) -> dict[str, MegatronCandidate]:
    """Returns the candidates by path; a module inside another comes after it."""
    layers = plan.stack.layer_paths()
    found = {layer: MegatronCandidate("layer", layer) for layer in layers}
    for path, layer in _attention_modules(plan).items():
        found[path] = MegatronCandidate("attention", layer, (layer,))
    for path, layer in _mixture_modules(plan, model).items():
        found[path] = MegatronCandidate("mixture", layer, (layer,))
    for path, mlp in plan.roles.mlps.items():
        index = plan.stack.index_of(path)
        if index is not None and path not in found:
            layer = plan.stack.layer_path(index)
            outer = (path[:end] for end in range(len(layer) + 1, len(path)) if path[end] == ".")
            found[path] = MegatronCandidate("MLP", layer, (layer, *(path for path in outer if path in found)), mlp)
    return found


def _attention_modules(plan: Plan) -> dict[str, str]:
    """Maps modules that compute attention, by the adapter's spec or in a run, to their layers."""
    structure, attention = plan.stack, plan.roles.attention
    found = {}
    if isinstance(attention, AttentionSpec):
        for layer in structure.layer_paths():
            if f"{layer}.{attention.out}.weight" in plan.canonical:
                found[f"{layer}.{attention.module}"] = layer
    for path in plan.tp_facts.attention:
        index = structure.index_of(path)
        if index is not None and path != structure.layer_path(index):
            found.setdefault(path, structure.layer_path(index))
    return found


def _take(plan: Plan, path: str, part: MegatronCandidate) -> Plan:
    """Returns the plan with one more module that Megatron's stands in for."""
    roles = plan.roles
    if part.kind == "layer":
        assert isinstance(roles.layer, LayerSpec)
        return _share_sinks(replace(plan, blocks=plan.blocks | {path}), path, roles.layer.attention)
    if part.kind == "attention":
        assert isinstance(roles.attention, AttentionSpec)
        return _share_sinks(replace(plan, attentions=plan.attentions | {path}), part.layer, roles.attention)
    if part.kind == "mixture":
        return replace(plan, mixtures=plan.mixtures | {path})
    assert isinstance(part.mlp, MlpSpec)
    return replace(plan, mlps={**plan.mlps, path: part.mlp})


def _share_sinks(plan: Plan, layer: str, attention: AttentionSpec) -> Plan:
    """Returns the plan with attention sinks cut by heads, as Megatron's attention has them.

    At other levels every rank holds all sinks.
    """
    if not attention.sinks:
        return plan
    whole = plan.placement(*f"{layer}.{attention.sinks}".rsplit(".", 1))
    sinks = replace(whole, axis=0, tp_gradient="complete")
    return replace(plan, placements={**plan.placements, whole.name: sinks})


def _settled(plan: Plan, path: str, part: MegatronCandidate, record: Record) -> bool:
    """Returns whether a module around is Megatron's, or the same required call asks for one around it."""
    asked = f"{record.path}." if record.path else ""
    by_same = required(record) and any(f"{outer}.".startswith(asked) for outer in part.around)
    return by_same or plan.in_block(path)


def _mixture_modules(plan: Plan, model: nn.Module) -> dict[str, str]:
    """Maps the paths of modules that contain experts to their layers."""
    structure = plan.stack
    found = {}
    for experts in find_experts(model):
        path, index = experts.rpartition(".")[0], structure.index_of(experts)
        if index is not None and path != structure.layer_path(index):
            found[path] = structure.layer_path(index)
    return found


def overlap_problems(plan: Plan) -> list[Problem]:
    """Returns a problem for each layer that can't overlap its communication under ``--tp-comm-overlap``."""
    structure = plan.structure
    if not plan.layout.tp_comm_overlap or structure is None:
        return []
    layers = structure.layer_paths()
    what = "--tp-comm-overlap: only Megatron's own layers overlap communication with their products"
    remedy = "call level('block') on the layer, where the model has it, or leave the flag out"
    return [Problem(what, layer, remedy=remedy) for layer in layers if layer not in plan.blocks]


def mixture_problems(plan: Plan, model: nn.Module) -> list[Problem]:
    """Returns a problem for each mixture that is not Megatron's own where Megatron's MoE flags require it."""
    flags = plan.layout.mixture_flags
    if not flags or plan.structure is None:
        return []
    what = f"{', '.join(flags)}: Megatron's own mixtures of experts do that"
    mixtures = _mixture_modules(plan, model)
    if not mixtures:
        none = f"{what}, and the model has none of the form that HF gives experts"
        return [Problem(none, remedy="leave it out")]
    remedy = "leave it out, or call level('block') on the mixture, where the model has it"
    problems = []
    for path, layer in mixtures.items():
        if path not in plan.mixtures and layer not in plan.blocks:
            reason = plan.declined.get(path, "") or plan.declined.get(layer, "")
            problems.append(Problem(f"{what}, and not this one{reason and f': {reason}'}", path, remedy=remedy))
    corrected = isinstance(plan.roles.moe, MoeSpec) and bool(plan.roles.moe.correction)
    bias = "--moe-router-enable-expert-bias"
    if bias in flags and not problems and not corrected:
        problems.append(Problem(f"{bias}: the definition's routers choose without a bias", remedy="leave it out"))
    return problems
