"""Describes what a schedule makes of each module of a definition, with one report for each module."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from megasched.cli.show.communication import Transfer, transfers
from megasched.definition.build import text_config
from megasched.language.module_specs import AttentionSpec, LayerSpec
from megasched.language.records import Record
from megasched.language.registry import get_primitive
from megasched.plan.placement import Placement
from megasched.plan.record_checks import sharded_attention
from megasched.trainer.losses.definition_loss import loss_lines
from megasched.trainer.session import Session

Kind = Literal["column", "row", "vocab", "features", "channels", "replicated", "whole"]
CUT = "cut_pipeline_stage"
LOWERED = {"column": "ColumnParallelLinear", "row": "RowParallelLinear"}


@dataclass(frozen=True)
class ParameterReport:
    """Describes one parameter of a module.

    Attributes:
        name: name in its module, e.g. ``weight``.
        shape: global shape in the HF checkpoint.
        local_shape: shape on one TP rank, padding included.
        padded: rows of a vocabulary after padding; None without padding.
        components: sizes of packed projections that are sharded one by one; mostly empty.
        transposed: whether the rank holds it transposed (HF ``Conv1D`` keeps [in, out], Megatron [out, in]).
        partial_gradient: whether each TP rank computes a part of its gradient, and the parts are summed.
        tied_to: full name of the parameter to which it is tied; None for a parameter of its own.
        trained: whether it gets a gradient.
    """

    name: str
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    padded: int | None = None
    components: tuple[int, ...] = ()
    transposed: bool = False
    partial_gradient: bool = False
    tied_to: str | None = None
    trained: bool = True


@dataclass(frozen=True)
class Asked:
    """Represents a primitive call that concerns a module: the call as text, and its ``file:line``."""

    primitive: str
    call: str
    source: str


@dataclass(frozen=True)
class ModuleReport:
    """Describes one module under a schedule.

    Attributes:
        path: path in the definition; empty for the model itself.
        hf_class: class in the definition; empty for a module that a replacement adds.
        becomes: class that runs, or a few words on what runs.
        kind: how its weight is placed on the TP ranks.
        parameters: its direct parameters, without those of its children.
        transfers: its operations over the TP group.
        recompute: whether its activations are computed again in the backward pass.
        notes: what else changes.
        asked: the schedule's calls on it.
        calls: number of its calls in one forward; more than one where layers run in loops, or are shared.
        stages: pipeline stages that it lives on, for a container those of its contents; `place_modules` fills it.
    """

    path: str
    hf_class: str
    becomes: str
    kind: Kind = "whole"
    parameters: tuple[ParameterReport, ...] = ()
    transfers: tuple[Transfer, ...] = ()
    recompute: bool = False
    notes: tuple[str, ...] = ()
    asked: tuple[Asked, ...] = ()
    calls: int = 1
    stages: tuple[int, ...] = ()

    def treatment(self) -> tuple[Any, ...]:
        """Returns what is equal for modules that are treated alike: all but the path, sources, stages and cuts."""
        calls = tuple(asked.call for asked in self.asked if asked.primitive != CUT)
        return (
            *(self.hf_class, self.becomes, self.kind, self.parameters),
            *(self.transfers, self.recompute, self.notes, calls, self.calls),
        )


def describe_modules(session: Session) -> list[ModuleReport]:
    """Returns the modules with direct parameters or anything else to report, and the modules around them.

    They are in the order of the module tree. Nothing is materialised.

    Raises:
        ScheduleError: the schedule has problems; the message lists all of them.
    """
    view = _View(session)
    reports = {path: view.describe(path, module) for path, module in session.replaced.named_modules()}
    kept = {""}
    for path, report in reports.items():
        if report.parameters or report.transfers or report.recompute or report.notes or report.asked:
            kept.update([*_around(path), path])
    return [report for path, report in reports.items() if path in kept]


class _View:
    """Describes modules, by tables that are prepared once for all of them."""

    def __init__(self, session: Session) -> None:
        self.session, self.plan = session, session.plan
        self.tp = self.plan.layout.tp
        moved = session.names.moved
        self.hf = {moved.get(p, p): type(module).__name__ for p, module in session.definition.named_modules()}
        self.transfers = self._transfers()
        self.records: dict[str, list[Record]] = defaultdict(list)
        self.replaced: set[str] = set()
        for record in self.plan.records:
            for path in self._paths(record):
                self.records[path].append(record)
                if get_primitive(record.primitive).replaces_modules:
                    self.replaced.add(path)
        self.tied = self._tied()
        self.sharded = sharded_attention(self.plan)
        self.calls = self.plan.structure.calls if self.plan.structure is not None else {}
        self.fused_columns = {path: paths for paths in self.plan.fused_columns for path in paths}

    def _transfers(self) -> dict[str, list[Transfer]]:
        roles = self.plan.roles
        attention = roles.layer.attention if isinstance(roles.layer, LayerSpec) else roles.attention
        latent = attention.mla if isinstance(attention, AttentionSpec) else None
        return transfers(self.plan, hidden_size=hidden_size(self.session), latent=latent, head=self.plan.head)

    def _paths(self, record: Record) -> list[str]:
        schedule = self.session.schedule
        node = schedule[record.path] if record.path else schedule
        return get_primitive(record.primitive).paths(node, record.arguments)

    def _tied(self) -> set[str]:
        """Returns the canonical names that several parameter names share."""
        counts = Counter(self.plan.canonical.values())
        return {name for name, count in counts.items() if count > 1}

    def describe(self, path: str, module: nn.Module) -> ModuleReport:
        kind: Kind = "replicated" if path in self.plan.replicated_heads else self.plan.cuts.get(path, "whole")
        records = self.records.get(path, [])
        return ModuleReport(
            path,
            self.hf.get(path, ""),
            self._becomes(path, module, kind),
            kind,
            tuple(self._parameter(path, *own) for own in module.named_parameters(recurse=False)),
            tuple(self.transfers.get(path, ())),
            any(record.primitive == "checkpoint" for record in records),
            tuple(self._notes(path, module, kind)),
            tuple(Asked(r.primitive, str(r).partition(": ")[2], r.source) for r in records),
            self.calls.get(path, 1),
        )

    def _becomes(self, path: str, module: nn.Module, kind: Kind) -> str:
        name = type(module).__name__
        if path in self.plan.blocks:
            return "Megatron's TransformerLayer"
        if path in self.plan.attentions:
            return "Megatron's SelfAttention"
        if path in self.plan.mixtures:
            return "Megatron's MoELayer"
        if path in self.plan.mlps:
            return "Megatron's MLP"
        if self.plan.in_block(path):
            return "in Megatron's layer"
        if path in self.plan.experts:
            return f"{name} of one EP rank"
        if kind == "vocab":
            return f"VocabParallel{name}"
        if kind == "features":
            return f"{name} of one rank's features"
        if kind == "replicated":
            heads = self.plan.replicated_heads[path].heads
            return f"replicated (kv heads {heads} < TP {self.tp}, each rank uses one)"
        if path in self.plan.te_linears:
            return f"Transformer Engine's Linear, {kind}"
        return LOWERED.get(kind, name)

    def _parameter(self, path: str, name: str, held: nn.Parameter) -> ParameterReport:
        full = f"{path}.{name}" if path else name
        placement: Placement = self.plan.placement(path, name)
        canonical = self.plan.canonical[full]
        return ParameterReport(
            name,
            placement.shape,
            self.plan.local_shape(placement),
            placement.padded if placement.padded != placement.shape[placement.axis or 0] else None,
            placement.components,
            placement.transposed,
            placement.tp_gradient == "partial" and self.tp > 1 and held.requires_grad,
            canonical if canonical != full else None,
            held.requires_grad,
        )

    def _notes(self, path: str, module: nn.Module, kind: Kind) -> list[str]:
        notes = []
        trained = next(module.parameters(), None) is not None
        if trained and path in self.calls and not self.calls.keys() & set(_around(path)):
            notes.append(f"called {self.calls[path]} times in a forward")
        if path in self.replaced and kind != "whole":
            notes.append(f"replaced by {type(module).__name__}")
        if self.plan.layout.pp > 1 and any(
            self.plan.canonical[f"{path}.{name}" if path else name] in self.tied
            for name in _own_parameters(module)
        ):
            notes.append("tied across stages: gradient summed over the embedding group")
        others = [other.rpartition(".")[2] for other in self.fused_columns.get(path, ()) if other != path]
        if others:
            notes.append(f"by one matrix product with {', '.join(others)}")
        if path in self.plan.declined:
            notes.append(f"not Megatron's: {self.plan.declined[path]}")
        if path in self.plan.experts:
            notes.append(f"experts shared out over EP {self.plan.layout.ep}, tokens sent to them")
        notes += self._context_notes(path)
        if path == self.plan.head:
            notes += loss_lines(self.plan)
        fp8 = self.plan.layout.fp8
        if fp8 is not None and path in self.plan.by_megatron | self.plan.te_linears:
            notes.append(f"in 8 bits ({fp8.fp8_recipe})" if self.plan.in_8_bits(path) else "in 16 bits")
        if self.tp > 1:
            notes += self._tp_notes(path, module, kind)
        return notes

    def _context_notes(self, path: str) -> list[str]:
        sequence, cp = self.plan.cp_facts, self.plan.layout.cp
        if sequence is None or self.plan.in_block(path):
            return []
        if path in sequence.regions:
            return [f"whole sequences, on each of {cp} CP ranks, and a rank's part of what comes out"]
        return [f"queries of a CP rank, keys and values of all {cp}"] if path in sequence.attention else []

    def _tp_notes(self, path: str, module: nn.Module, kind: Kind) -> list[str]:
        notes = []
        heads, sharded = self.plan.tp_facts.attention.get(path, (0, False))
        if sharded:
            notes.append(f"{heads} query heads, {heads // self.tp} on each rank")
        attributes = self.plan.roles.local_attributes.get(path, ())
        if attributes and path not in self.replaced and self.sharded(path):
            notes.append(f"divided by TP: {', '.join(attributes)}")
        if path in self.plan.tp_facts.forked:
            notes.append("each TP rank draws its own random numbers")
        if path in self.plan.tp_facts.logits:
            notes.append("logits stay cut over the vocabulary, up to the loss")
        structure = self.plan.structure
        if structure is not None and path == structure.layers and self.plan.layout.sp:
            first, last = (f"{path.rpartition('.')[2]}.{index}" for index in (0, structure.count - 1))
            notes.append(f"hidden state cut along the sequence at {first} (backward all_gather)")
            notes.append(f"whole again after {last} (forward all_gather)")
            notes.append("each TP rank draws its own random numbers")
        return notes


def hidden_size(session: Session) -> int | None:
    """Returns the width of the hidden state; None where the config does not say."""
    config = text_config(session.definition.config)
    return next(
        (getattr(config, name) for name in ("hidden_size", "n_embd", "d_model") if hasattr(config, name)), None
    )


def _around(path: str) -> list[str]:
    """Returns the paths of the modules that contain a module, the outermost first, without the model itself."""
    parts = path.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts))]


def _own_parameters(module: nn.Module) -> list[str]:
    return [name for name, _ in module.named_parameters(recurse=False)]
