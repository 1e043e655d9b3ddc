"""Which decoder layers Megatron's own ``TransformerLayer`` computes, and in the others which attention its
``SelfAttention``, which mixtures of experts its ``MoELayer`` and which MLPs its ``MLP``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from megasched.errors import Problem
from megasched.experts import find_experts
from megasched.lowering.block_parameters import (
    assemblies,
    attention_assemblies,
    attention_parameter_names,
    has_bias,
    mixture_assemblies,
    mixture_in,
    mixture_parameter_names,
    mlp_assemblies,
    mlp_of,
    mlp_parameter_names,
    parameter_names,
    whole_of_mixture,
)
from megasched.lowering.joining import level_at, levels_asked, required
from megasched.lowering.plan import Plan
from megasched.records import Record
from megasched.roles import Attention, Block, Cut, Mixture, Mlp, Roles

if TYPE_CHECKING:
    from torch import nn

    from megasched.assembly import Assembly

# Calls on a module itself are carried out on what takes its place; nothing inside it is left to call.
_INSIDE = ("shard", "level")


def choose_blocks(plan: Plan, model: nn.Module, roles: Roles, by_trainer: bool) -> list[Problem]:
    """Fills ``plan.blocks``, ``plan.attentions``, ``plan.mixtures`` and ``plan.mlps`` with what is at level
    ``block``; a problem for each module that can't be and must.

    Args:
        by_trainer: the model is built for Megatron's trainer, whose config its layers need.
    """
    levels = levels_asked(plan)
    asked = {path: record for path, record in levels.items() if record.arguments["name"] == "block"}
    if not asked:
        return []
    structure = plan.structure
    if structure is None or not by_trainer:
        what = "Megatron's layers need the config of its trainer"
        remedy = "train through `python -m megasched pretrain_gpt.py`, or use level('fused')"
        return [Problem(what, path, r.source, remedy) for path, r in asked.items() if required(r)]
    choice, parts = _Choice(plan, model, roles), _parts(plan, model, roles)
    problems = []
    for path, record in asked.items():
        if structure.index_of(path) is not None and path not in parts:
            what = "a block is a whole decoder layer, its attention, its mixture of experts or its MLP"
            problems.append(Problem(what, path, record.source, "call level('block') on one of them"))
    for path, part in parts.items():
        record = level_at(levels, path)
        if record is None or record.arguments["name"] != "block" or _settled(plan, path, part, record):
            continue
        reason = choice.why_not(path, part)
        if not reason:
            _take(plan, path, part, roles)
        elif required(record):
            what = f"Megatron's {part.kind} can't stand for this one: {reason}"
            problems.append(Problem(what, path, record.source, "use level('fused') here"))
        else:
            plan.not_blocks[path] = reason
    return problems


@dataclass(frozen=True)
class _Part:
    """A module that one of Megatron's may stand for.

    Attributes:
        layer: the layer that it is or is in.
        around: the others that it is in; where one of them is Megatron's, this is gone.
        mlp: how it is put together, or why Megatron's can't be; of an MLP alone.
    """

    kind: Literal["layer", "attention", "mixture", "MLP"]
    layer: str
    around: tuple[str, ...] = ()
    mlp: Mlp | str = ""


def _parts(plan: Plan, model: nn.Module, roles: Roles) -> dict[str, _Part]:
    """By their paths; what is in another comes after it."""
    assert plan.structure is not None
    layers = plan.structure.layer_paths()
    found = {layer: _Part("layer", layer) for layer in layers}
    for path, layer in _attention_modules(plan, roles).items():
        found[path] = _Part("attention", layer, (layer,))
    for path, layer in _mixture_modules(plan, model).items():
        found[path] = _Part("mixture", layer, (layer,))
    for path, mlp in roles.mlps.items():
        index = plan.structure.index_of(path)
        if index is not None and path not in found:
            layer = plan.structure.layer_path(index)
            outer = (path[:end] for end in range(len(layer) + 1, len(path)) if path[end] == ".")
            found[path] = _Part("MLP", layer, (layer, *(path for path in outer if path in found)), mlp)
    return found


def _attention_modules(plan: Plan, roles: Roles) -> dict[str, str]:
    """Modules that are as the adapter says of attention, or were seen to compute it -> their layers."""
    structure = plan.structure
    assert structure is not None
    found = {}
    if isinstance(roles.attention, Attention):
        for layer in structure.layer_paths():
            if f"{layer}.{roles.attention.out}.weight" in plan.canonical:
                found[f"{layer}.{roles.attention.module}"] = layer
    for path in plan.derived.attention:
        index = structure.index_of(path)
        if index is not None and path != structure.layer_path(index):
            found.setdefault(path, structure.layer_path(index))
    return found


def _take(plan: Plan, path: str, part: _Part, roles: Roles) -> None:
    """Has a module be Megatron's, which can stand for it."""
    if part.kind == "layer":
        plan.blocks.add(path)
        assert isinstance(roles.block, Block)
        _share_sinks(plan, path, roles.block.attention)
    elif part.kind == "attention":
        plan.attentions.add(path)
        assert isinstance(roles.attention, Attention)
        _share_sinks(plan, part.layer, roles.attention)
    elif part.kind == "mixture":
        plan.mixtures.add(path)
    else:
        assert isinstance(part.mlp, Mlp)
        plan.mlps[path] = part.mlp


def _share_sinks(plan: Plan, layer: str, attention: Attention) -> None:
    """Sinks are whole on each rank at other levels; in Megatron's attention a rank has those of its heads."""
    if attention.sinks:
        whole = plan.placement(*f"{layer}.{attention.sinks}".rsplit(".", 1))
        plan.placements[whole.name] = replace(whole, axis=0, tp_gradient="complete")


def _settled(plan: Plan, path: str, part: _Part, record: Record) -> bool:
    """Whether a module around is Megatron's, or was to be by the same call, and a problem says why it can't."""
    asked = f"{record.path}." if record.path else ""
    by_same = required(record) and any(f"{outer}.".startswith(asked) for outer in part.around)
    return by_same or plan.in_block(path)


def _mixture_modules(plan: Plan, model: nn.Module) -> dict[str, str]:
    """Modules in which experts are -> their layers."""
    structure = plan.structure
    assert structure is not None
    found = {}
    for experts in find_experts(model):
        path, index = experts.rpartition(".")[0], structure.index_of(experts)
        if index is not None and path != structure.layer_path(index):
            found[path] = structure.layer_path(index)
    return found


def overlap_problems(plan: Plan) -> list[Problem]:
    """A problem for each layer that does not overlap its communication as ``--tp-comm-overlap`` asks."""
    structure = plan.structure
    if not plan.layout.tp_comm_overlap or structure is None:
        return []
    layers = structure.layer_paths()
    what = "--tp-comm-overlap: only Megatron's own layers overlap communication with their products"
    remedy = "call level('block') on the layer, where the model has it, or leave the flag out"
    return [Problem(what, layer, remedy=remedy) for layer in layers if layer not in plan.blocks]


def mixture_problems(plan: Plan, model: nn.Module, roles: Roles) -> list[Problem]:
    """A problem for each mixture that is not Megatron's own where its flags ask for that."""
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
            reason = plan.not_blocks.get(path, "") or plan.not_blocks.get(layer, "")
            problems.append(Problem(f"{what}, and not this one{reason and f': {reason}'}", path, remedy=remedy))
    corrected = isinstance(roles.mixture, Mixture) and bool(roles.mixture.correction)
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
            self.records[layer].append(record)


@dataclass(frozen=True)
class _Content:
    """What Megatron's module would stand for.

    Attributes:
        path: of the module.
        layer: the layer that it is or is in; other paths are relative to it.
        cuts: linear -> how it must be cut.
        known: names of parameters that there may be.
        whole: linears that every TP rank must have whole.
    """

    path: str
    layer: str
    cuts: Mapping[str, Cut]
    known: Iterable[str]
    whole: Iterable[str]


class _Choice:
    """Why Megatron's modules can't stand for those of one plan; empty where they can."""

    def __init__(self, plan: Plan, model: nn.Module, roles: Roles) -> None:
        self.plan, self.roles = plan, roles
        self.trained = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
        self.inside = _Inside(plan)

    def why_not(self, path: str, part: _Part) -> str:
        if part.kind == "layer":
            return self._why_not_layer(path)
        if part.kind == "attention":
            return self._why_not_attention(path, part)
        return self._why_not_mixture(path, part) if part.kind == "mixture" else self._why_not_mlp(path, part)

    def _why_not_layer(self, layer: str) -> str:
        plan, block = self.plan, self.roles.block
        if isinstance(block, str):
            return block
        mixture = mixture_in(plan, layer, self.roles)
        if mixture is None and f"{layer}.{block.mlp.down}.weight" not in plan.canonical:
            return str(self.roles.mixture)
        if mixture is not None and plan.layout.tp > 1 and not plan.layout.sp:
            return "its mixture of experts wants sequence parallelism where there are TP ranks"
        attention, (inputs, outputs) = block.attention, mlp_of(block, mixture)
        cuts = _cuts((*attention.inputs, *inputs), (attention.out, *outputs))
        whole = [*attention.whole, *(whole_of_mixture(mixture) if mixture is not None else ())]
        content = _Content(layer, layer, cuts, parameter_names(block, mixture), whole)
        return (
            self._attention_wants(attention)
            or self._why_not_lowered(content)
            or self._biases_of_attention(layer, attention)
            or self._uneven_biases(layer, (*inputs, *outputs))
            or self._unlike(content, assemblies(plan, layer, self.roles))
        )

    def _why_not_attention(self, path: str, part: _Part) -> str:
        plan, attention = self.plan, self.roles.attention
        if isinstance(attention, str):
            return attention
        if path != f"{part.layer}.{attention.module}":
            return "nothing is known of it"
        if attention.out_dropout:
            return "it drops out what it returns, and Megatron's does not"
        cuts = _cuts(attention.inputs, (attention.out,))
        content = _Content(path, part.layer, cuts, attention_parameter_names(attention), attention.whole)
        return (
            self._attention_wants(attention)
            or self._handed_whole(path, part)
            or self._why_not_lowered(content)
            or self._biases_of_attention(part.layer, attention)
            or self._unlike(content, attention_assemblies(plan, part.layer, attention))
        )

    def _attention_wants(self, attention: Attention) -> str:
        layout = self.plan.layout
        if attention.latent is not None and layout.tp > 1 and not layout.sp:
            return "its latent attention wants sequence parallelism where there are TP ranks"
        packed = bool(attention.sinks) and layout.packed_sequences
        return "Transformer Engine has no sinks for packed sequences" if packed else ""

    def _why_not_mixture(self, path: str, part: _Part) -> str:
        plan, mixture = self.plan, self.roles.mixture
        if isinstance(mixture, str):
            return mixture
        if mixture_in(plan, part.layer, self.roles) is None or path != f"{part.layer}.{mixture.module}":
            return "nothing is known of it"
        if plan.layout.tp > 1 and not plan.layout.sp:
            return "it wants sequence parallelism where there are TP ranks"
        cuts = _cuts(mixture.shared_inputs, mixture.shared_outputs)
        content = _Content(path, part.layer, cuts, mixture_parameter_names(mixture), whole_of_mixture(mixture))
        return (
            self._handed_whole(path, part)
            or self._why_not_lowered(content)
            or self._unlike(content, mixture_assemblies(plan, part.layer, mixture))
        )

    def _why_not_mlp(self, path: str, part: _Part) -> str:
        plan, mlp = self.plan, part.mlp
        if isinstance(mlp, str):
            return mlp
        linears = (*mlp.inputs, mlp.down)
        content = _Content(path, part.layer, _cuts(mlp.inputs, (mlp.down,)), mlp_parameter_names(mlp), ())
        return (
            self._handed_whole(path, part)
            or self._why_not_lowered(content)
            or self._uneven_biases(part.layer, linears)
            or self._unlike(content, mlp_assemblies(plan, part.layer, mlp))
        )

    def _handed_whole(self, path: str, part: _Part) -> str:
        """Whether a module in a layer is handed what was sent already, or more than its part of a sequence."""
        plan, layer = self.plan, part.layer
        around = {layer, *(path[:end] for end in range(len(layer), len(path)) if path[end] == ".")}
        if plan.layout.tp > 1 and not around.isdisjoint(plan.derived.regions):
            return "what is around it communicates for it"
        if plan.layout.sp and plan.derived.whole_slots.get(path):
            return "it is handed whole tensors, and not its part of the sequence"
        sequence = plan.sequence
        if sequence is not None and not {path, *around}.isdisjoint(sequence.regions):
            return "it is handed whole sequences, and not its part of them"
        return ""

    def _why_not_lowered(self, content: _Content) -> str:
        """What of a part is cut, called or there otherwise than Megatron's module has it."""
        plan = self.plan
        for name, cut in content.cuts.items():
            path = f"{content.layer}.{name}"
            if plan.cuts.get(path) != cut or path in plan.derived.gather or path in plan.derived.scatter:
                return f"{name} is not sharded as a {cut}"
            if path in plan.replicated_heads:
                return f"there are more TP ranks than heads of {name}"
        for record in self.inside.records[content.layer]:
            own = record.path == content.path
            if (own and record.primitive not in ("trace", "trace_until")) or record.primitive in _INSIDE:
                continue
            if own or record.path.startswith(f"{content.path}."):
                what = record.path[len(content.layer) + 1 :] or "the layer"
                return f"the schedule calls {record.primitive} on {what}, which is gone then"
        known = {f"{content.layer}.{name}" for name in content.known}
        strange = [name[len(content.layer) + 1 :] for name in self._names(content) if name not in known]
        if strange:
            return f"nothing is known of {', '.join(strange)}"
        for name in content.whole:
            if plan.placement(f"{content.layer}.{name}", "weight").sharded:
                return f"{name} is sharded"
        return ""

    def _unlike(self, content: _Content, made: Mapping[str, Assembly]) -> str:
        """What of a part's parameters is not its own, or not trained as the others."""
        if any(self.plan.canonical[name] != name for name in self._names(content)):
            return "a parameter is tied to one of another layer"
        for parts in made.values():
            if len({self.trained[part.name] for part in parts.parts}) > 1:
                return f"only some of {parts.name} are trained"
        return ""

    def _names(self, content: _Content) -> list[str]:
        return [name for name in self.inside.names[content.layer] if name.startswith(f"{content.path}.")]

    def _uneven_biases(self, layer: str, names: Sequence[str]) -> str:
        """Whether some of these linears have a bias, and Megatron's flag would give one to all or none."""
        uneven = len({has_bias(self.plan, layer, name) for name in names}) > 1
        return f"only some of {', '.join(names)} have a bias" if uneven else ""

    def _biases_of_attention(self, layer: str, attention: Attention) -> str:
        first, out = attention.inputs[0], attention.out
        lone = has_bias(self.plan, layer, out) and not has_bias(self.plan, layer, first)
        uneven = self._uneven_biases(layer, attention.inputs)
        return uneven or (f"{out} has a bias and {first} has none" if lone else "")


def _cuts(inputs: Iterable[str], outputs: Iterable[str]) -> dict[str, Cut]:
    return {**dict.fromkeys(inputs, "column"), **dict.fromkeys(outputs, "row")}
