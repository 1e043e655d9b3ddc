"""Finds why Megatron's own modules can't stand in for a definition's."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import nn

from megasched.errors import Declined
from megasched.language.module_specs import AttentionSpec, LayerSpec, MlpSpec, MoeSpec
from megasched.language.records import Record
from megasched.language.registry import get_primitive
from megasched.language.roles import Cut
from megasched.plan.megatron.params import (
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
from megasched.plan.param_mapping import ParamMapping
from megasched.plan.plan import Plan


@dataclass(frozen=True)
class TrialSubject:
    """Identifies a module that a trial compares with Megatron's by numbers.

    Attributes:
        kind: layer, attention or mixture.
        path: path of the module.
        layer: path of its decoder layer: the module itself, or the one around it.
    """

    kind: str
    path: str
    layer: str


# Made for a plan, a definition and all that may be asked for; says of one of them why Megatron's module
# computes something else, empty where it computes the same. Megatron is run for that, above this floor.
Trial = Callable[[TrialSubject], str]
MakeTrials = Callable[[Plan, "nn.Module", Iterable[TrialSubject]], Trial]


@dataclass(frozen=True)
class MegatronCandidate:
    """Describes a module that one of Megatron's may stand in for.

    Attributes:
        layer: path of its decoder layer: the module itself, or the one around it.
        around: paths of the candidates that it is in; where one of them is Megatron's, this module is gone.
        mlp: spec of an MLP, or why Megatron's can't stand in for it; set for an MLP only.
    """

    kind: Literal["layer", "attention", "mixture", "MLP"]
    layer: str
    around: tuple[str, ...] = ()
    mlp: MlpSpec | Declined = field(default=Declined("it is no MLP"))


class _Inside:
    """Holds, for each layer, the names of its parameters and the schedule's calls on its modules."""

    def __init__(self, plan: Plan) -> None:
        structure = plan.stack
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


def _edits_inside(record: Record, path: str) -> bool:
    """Returns whether a record is about operations, in the graph of what is around a module, of that module."""
    inner = path[len(record.path) + 1 :] if record.path else path
    around = path != record.path and f"{path}.".startswith(f"{record.path}." if record.path else "")
    nodes = record.arguments.get("subgraph", {}).get("nodes", ())
    return around and any(node.startswith(f"{inner}.") for node in nodes)


@dataclass(frozen=True)
class _Content:
    """Describes the part of a definition that Megatron's module would stand in for.

    Attributes:
        path: path of the module.
        layer: path of its decoder layer; the names below are relative to it.
        cuts: linear -> how it must be cut.
        known: names of parameters that the part may have.
        whole: linears that must be replicated over TP.
    """

    path: str
    layer: str
    cuts: Mapping[str, Cut]
    known: Iterable[str]
    whole: Iterable[str]


class MegatronFit:
    """Tells why Megatron's modules can't stand in for those of one plan; empty where they can.

    Args:
        trials: makes the trials that compare them by numbers; without it only MLPs can fit.
    """

    def __init__(
        self,
        plan: Plan,
        model: nn.Module,
        parts: Mapping[str, MegatronCandidate],
        trials: MakeTrials | None,
    ) -> None:
        self.plan = plan
        self.subjects = {
            path: TrialSubject(part.kind, path, part.layer)
            for path, part in parts.items()
            if self._is_described(path, part)
        }
        self.trial = None if trials is None else trials(plan, model, self.subjects.values())
        self.trained = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
        self.inside = _Inside(plan)

    def __call__(self, path: str, part: MegatronCandidate) -> str:
        reason = self._by_description(path, part)
        if reason or part.kind == "MLP":  # which was tried when it was described
            return reason
        return (
            "no trial has compared it with Megatron's" if self.trial is None else self.trial(self.subjects[path])
        )

    def _is_described(self, path: str, part: MegatronCandidate) -> bool:
        """Returns whether a spec says how a layer, attention or mixture would be Megatron's."""
        roles = self.plan.roles
        if part.kind == "layer":
            layer = roles.layer
            return isinstance(layer, LayerSpec) and self.plan.holds_parameters(f"{path}.{layer.attention.out}")
        if part.kind == "attention":
            return isinstance(roles.attention, AttentionSpec) and path == f"{part.layer}.{roles.attention.module}"
        return part.kind == "mixture" and isinstance(roles.moe, MoeSpec)

    def _by_description(self, path: str, part: MegatronCandidate) -> str:
        if part.kind == "layer":
            return self._why_not_layer(path)
        if part.kind == "attention":
            return self._why_not_attention(path, part)
        return self._why_not_mixture(path, part) if part.kind == "mixture" else self._why_not_mlp(path, part)

    def _why_not_layer(self, layer: str) -> str:
        plan, block = self.plan, self.plan.roles.layer
        if isinstance(block, Declined):
            return block.reason
        mixture = mixture_in(plan, layer)
        if mixture is None and f"{layer}.{block.mlp.down}.weight" not in plan.canonical:
            return f"it has no linear {block.mlp.down}, and {self.plan.roles.moe}"
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
            or self._unlike(content, assemblies(plan, layer))
        )

    def _why_not_attention(self, path: str, part: MegatronCandidate) -> str:
        plan, attention = self.plan, self.plan.roles.attention
        if isinstance(attention, Declined):
            return attention.reason
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

    def _attention_wants(self, attention: AttentionSpec) -> str:
        layout = self.plan.layout
        if attention.mla is not None and layout.tp > 1 and not layout.sp:
            return "its latent attention wants sequence parallelism where there are TP ranks"
        packed = bool(attention.sinks) and layout.packed_sequences
        return "Transformer Engine has no sinks for packed sequences" if packed else ""

    def _why_not_mixture(self, path: str, part: MegatronCandidate) -> str:
        plan, mixture = self.plan, self.plan.roles.moe
        if isinstance(mixture, Declined):
            return mixture.reason
        if mixture_in(plan, part.layer) is None or path != f"{part.layer}.{mixture.module}":
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

    def _why_not_mlp(self, path: str, part: MegatronCandidate) -> str:
        plan, mlp = self.plan, part.mlp
        if isinstance(mlp, Declined):
            return mlp.reason
        linears = (*mlp.inputs, mlp.down)
        content = _Content(path, part.layer, _cuts(mlp.inputs, (mlp.down,)), mlp_parameter_names(mlp), ())
        return (
            self._handed_whole(path, part)
            or self._why_not_lowered(content)
            or self._uneven_biases(part.layer, linears)
            or self._unlike(content, mlp_assemblies(plan, part.layer, mlp))
        )

    def _handed_whole(self, path: str, part: MegatronCandidate) -> str:
        """Returns why a module's input exceeds its part of a sequence or is communicated already; else empty."""
        plan, layer = self.plan, part.layer
        around = {layer, *(path[:end] for end in range(len(layer), len(path)) if path[end] == ".")}
        if plan.layout.tp > 1 and not around.isdisjoint(plan.tp_facts.regions):
            return "what is around it communicates for it"
        if plan.layout.sp and plan.tp_facts.whole_slots.get(path):
            return "it is handed whole tensors, and not its part of the sequence"
        sequence = plan.cp_facts
        if sequence is not None and not {path, *around}.isdisjoint(sequence.regions):
            return "it is handed whole sequences, and not its part of them"
        return ""

    def _why_not_lowered(self, content: _Content) -> str:
        """Returns which cut, schedule call or parameter rules Megatron's module out; empty without one."""
        plan = self.plan
        for name, cut in content.cuts.items():
            path = f"{content.layer}.{name}"
            if plan.cuts.get(path) != cut or path in plan.tp_facts.gather or path in plan.tp_facts.scatter:
                return f"{name} is not sharded as a {cut}"
            if path in plan.replicated_heads:
                return f"there are more TP ranks than heads of {name}"
        for record in (*self.inside.records[content.layer], *self.inside.records[""]):
            if _edits_inside(record, content.path):
                return f"the schedule calls {record.primitive} on operations in it, which are gone then"
            own, primitive = record.path == content.path, get_primitive(record.primitive)
            if (own and primitive.on_megatron_module) or primitive.inside_megatron_module:
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

    def _unlike(self, content: _Content, made: Mapping[str, ParamMapping]) -> str:
        """Returns why the parameters can't be Megatron's: tied elsewhere, or trained in part; or empty."""
        if any(self.plan.canonical[name] != name for name in self._names(content)):
            return "a parameter is tied to one of another layer"
        for parts in made.values():
            if len({self.trained[part.name] for part in parts.parts}) > 1:
                return f"only some of {parts.name} are trained"
        return ""

    def _names(self, content: _Content) -> list[str]:
        return [name for name in self.inside.names[content.layer] if name.startswith(f"{content.path}.")]

    def _uneven_biases(self, layer: str, names: Sequence[str]) -> str:
        """Returns a reason where only some of these linears have a bias: Megatron's flag is for all or none."""
        uneven = len({has_bias(self.plan, layer, name) for name in names}) > 1
        return f"only some of {', '.join(names)} have a bias" if uneven else ""

    def _biases_of_attention(self, layer: str, attention: AttentionSpec) -> str:
        first, out = attention.inputs[0], attention.out
        lone = has_bias(self.plan, layer, out) and not has_bias(self.plan, layer, first)
        uneven = self._uneven_biases(layer, attention.inputs)
        return uneven or (f"{out} has a bias and {first} has none" if lone else "")


def _cuts(inputs: Iterable[str], outputs: Iterable[str]) -> dict[str, Cut]:
    return {**dict.fromkeys(inputs, "column"), **dict.fromkeys(outputs, "row")}
