"""From the records to a plan: how every parameter lies, what is communicated, what is wrong.

The whole schedule is validated before anything is changed; every problem found goes into one report.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from megasched.errors import Problem, ScheduleError
from megasched.layout import Layout
from megasched.lowering.meta_call import meta_copy, to_meta, token_inputs
from megasched.lowering.propagate import Derived, propagate
from megasched.lowering.structure import Structure, find_structure
from megasched.lowering.sync import check_syncs
from megasched.placement import Placement
from megasched.records import Record
from megasched.registry import get_primitive
from megasched.roles import Cut
from megasched.schedule import Schedule


@dataclass
class Plan:
    """What ``build`` will do.

    Attributes:
        layout: how the job is spread.
        cuts: module path -> column, row or vocab.
        replicated_heads: paths of k and v projections with fewer heads than TP ranks, which stay whole
            and of which each rank uses its slice; path -> number of heads.
        placements: canonical parameter name -> placement; total over the definition.
        canonical: every parameter name (ties have several) -> canonical name.
        structure: where the layers are; None for a model that is not a causal language model.
        derived: what follows from the placements.
    """

    layout: Layout
    records: list[Record]
    cuts: dict[str, Cut] = field(default_factory=dict)
    replicated_heads: dict[str, int] = field(default_factory=dict)
    placements: dict[str, Placement] = field(default_factory=dict)
    canonical: dict[str, str] = field(default_factory=dict)
    structure: Structure | None = None
    derived: Derived = field(default_factory=Derived)

    def placement(self, path: str, param: str) -> Placement:
        """The placement of the parameter ``param`` of the module at ``path``."""
        return self.placements[self.canonical[f"{path}.{param}" if path else param]]

    def records_of(self, *primitives: str) -> list[Record]:
        return [record for record in self.records if record.primitive in primitives]


def make_plan(
    schedule: Schedule,
    *,
    model: nn.Module | None = None,
    inputs: Mapping[str, Any] | None = None,
    causal_lm: bool = False,
    vocab_multiple: int | None = None,
) -> Plan:
    """Validates a schedule and derives everything from it.

    Args:
        schedule: the records; its layout counts.
        model: the definition after replacements; the schedule's own model by default.
        inputs: example arguments of the model's forward; token ids for a causal language model by default.
        causal_lm: an HF causal language model for Megatron's trainer: logits stay cut over the vocabulary
            up to the loss, and the layers must form a list.
        vocab_multiple: vocabularies are padded to a multiple of this; TP by default.

    Raises:
        ScheduleError: with every problem found.
    """
    model = schedule.mod if model is None else model
    plan = Plan(schedule.layout, list(schedule.records))
    problems = _check_records(schedule)
    names: dict[int, str] = {id(p): name for name, p in model.named_parameters()}
    plan.canonical = {name: names[id(p)] for name, p in model.named_parameters(remove_duplicate=False)}
    if not problems:
        problems += _place(schedule, model, plan, vocab_multiple or schedule.layout.tp)
        problems += _check_ties(schedule, model, plan)
    if not problems:
        problems += _derive(schedule, model, plan, inputs, causal_lm)
    if problems:
        raise ScheduleError(problems)
    return plan


def _check_records(schedule: Schedule) -> list[Problem]:
    """What each primitive finds wrong with its own calls, and parameters that are cut twice."""
    problems: list[Problem] = []
    shards: dict[tuple[str, str], Record] = {}
    for record in schedule.records:
        node = schedule.root[record.path] if record.path else schedule.root
        problems += get_primitive(record.primitive).check(node, record.arguments, record.source)
        if record.primitive != "shard":
            continue
        key = (record.path, record.arguments["param"])
        if key in shards:
            first = shards[key]
            what = f"{key[1]} is sharded twice: along axis {first.arguments['axis']} at {first.source}, and again"
            problems.append(Problem(what, record.path, record.source, "remove one of the two calls"))
        shards[key] = record
    return problems


def _place(schedule: Schedule, model: nn.Module, plan: Plan, vocab_multiple: int) -> list[Problem]:
    """Placements of all parameters, the sharded ones by their records."""
    problems: list[Problem] = []
    for name, parameter in model.named_parameters():
        plan.placements[name] = Placement(name, tuple(parameter.shape))
    for record in plan.records_of("shard"):
        problems += _place_one(schedule, model.get_submodule(record.path), plan, record, vocab_multiple)
    return problems


def _place_one(
    schedule: Schedule, module: nn.Module, plan: Plan, record: Record, vocab_multiple: int
) -> list[Problem]:
    path, tp = record.path, plan.layout.tp
    param, axis = record.arguments["param"], record.arguments["axis"]
    cut = _cut_of(module, param, axis)
    if cut is None:
        if param == "bias" and _cut_of(module, "weight", output_axis(module)) is not None:
            return []  # a bias follows its weight
        what = f"{type(module).__name__}.{param} can't be sharded along axis {axis}"
        remedy = "Linear and HF Conv1D along either axis, Embedding along axis 0 (the vocabulary)"
        return [Problem(what, path, record.source, remedy)]
    kv = _kv_heads(schedule, path, tp)
    if isinstance(kv, Problem):
        return [replace(kv, source=record.source)]
    if kv is not None:
        plan.replicated_heads[path] = kv
    components = record.arguments.get("components") or schedule.roles.components.get(path, ())
    for name, parameter in module.named_parameters(recurse=False):
        placement = _placement(plan, path, name, parameter, module, cut, kv, components if cut == "column" else ())
        if cut == "vocab" or (cut == "column" and schedule.role_of(path) == "head"):
            length = placement.shape[placement.axis or 0]
            placement = replace(placement, padded=-(-length // vocab_multiple) * vocab_multiple)
        uneven = [n for n in (placement.component_sizes if placement.sharded else ()) if n % tp]
        if uneven:
            what = f"TP {tp} does not divide {name} {list(placement.shape)} along axis {placement.axis}"
            what += f" (component of {uneven[0]})" if placement.components else ""
            return [Problem(what, path, record.source, f"a tensor parallel size that divides {uneven[0]}")]
        plan.placements[placement.name] = placement
    plan.cuts[path] = cut
    return []


def output_axis(module: nn.Module) -> int:
    """Axis of the output features in a linear's weight: 0, but 1 in HF's Conv1D, which keeps [in, out]."""
    return 1 if type(module).__name__ == "Conv1D" else 0


def is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def _cut_of(module: nn.Module, param: str, axis: int) -> Cut | None:
    if param == "weight" and is_linear(module):
        return "column" if axis == output_axis(module) else "row"
    if param == "weight" and isinstance(module, nn.Embedding) and axis == 0:
        return "vocab"
    return None


def _placement(
    plan: Plan,
    path: str,
    name: str,
    parameter: nn.Parameter,
    module: nn.Module,
    cut: Cut,
    kv_heads: int | None,
    components: tuple[int, ...],
) -> Placement:
    full_name = plan.canonical[f"{path}.{name}" if path else name]
    placement = Placement(full_name, tuple(parameter.shape))
    transposed = output_axis(module) == 1 and parameter.dim() == 2
    if kv_heads is not None:
        return replace(placement, tp_gradient="partial", transposed=transposed)
    if cut == "vocab":
        return replace(placement, axis=0)
    if name == "bias":
        return replace(placement, axis=0, components=components) if cut == "column" else placement
    axis = output_axis(module) if cut == "column" else 1 - output_axis(module)
    return replace(placement, axis=axis, components=components, transposed=transposed)


def _kv_heads(schedule: Schedule, path: str, tp: int) -> int | Problem | None:
    """Heads of a k or v projection that must be replicated; None where its heads divide; a problem otherwise."""
    heads = schedule.roles.heads.get(path)
    role = schedule.role_of(path)
    if heads is None or heads % tp == 0:
        return None
    if role in ("qkv.k", "qkv.v") and heads < tp and tp % heads == 0:
        return heads
    what = f"TP {tp} does not divide {heads} heads of {role}"
    if role in ("qkv.k", "qkv.v"):
        remedy = f"a tensor parallel size that divides {heads}, or that is a multiple of it (heads are replicated)"
    else:
        remedy = f"a tensor parallel size that divides {heads}"
    return Problem(what, path, remedy=remedy)


def _check_ties(schedule: Schedule, model: nn.Module, plan: Plan) -> list[Problem]:
    """Tied parameters must be cut alike on every side."""
    sides: dict[str, list[str]] = defaultdict(list)
    for name, canonical in plan.canonical.items():
        sides[canonical].append(name.rpartition(".")[0])
    problems = []
    sources = {record.path: record.source for record in plan.records_of("shard")}
    for canonical, paths in sides.items():
        cut = [path for path in paths if path in plan.cuts]
        if not cut or len(cut) == len(paths):
            continue
        whole = [path for path in paths if path not in plan.cuts]
        what = f"{canonical} is tied: {', '.join(cut)} shards it, {', '.join(whole)} does not"
        remedy = "shard both sides along the vocabulary, or neither"
        problems.append(Problem(what, cut[0], sources.get(cut[0], ""), remedy))
    return problems


def _derive(
    schedule: Schedule, model: nn.Module, plan: Plan, inputs: Mapping[str, Any] | None, causal_lm: bool
) -> list[Problem]:
    """Structure, propagation, and what of it goes into the placements."""
    layout = plan.layout
    if causal_lm:
        plan.structure = find_structure(model)
    needed = bool(plan.cuts) or any(r.primitive == "replace" for r in plan.records)
    if inputs is None and causal_lm:
        inputs = token_inputs(2, 5)
    if not needed:
        return check_syncs(plan)
    if inputs is None:
        return _without_inputs(plan)
    asked = frozenset(record.path for record in plan.records_of("fork_rng"))
    gather = frozenset(
        record.path
        for record in plan.records_of("sync")
        if plan.cuts.get(record.path) == "column"
        and (record.arguments["mode"], record.arguments["op"]) == ("fwd_post", "all_gather")
    )
    plan.derived = propagate(
        meta_copy(model),
        to_meta(dict(inputs)),
        plan.cuts,
        structure=plan.structure,
        sequence_parallel=layout.sp and causal_lm,
        loss_takes_shards=causal_lm,
        forked_by_user=asked,
        gathered_by_user=gather,
    )
    _mark_partial(plan)
    return plan.derived.problems + check_syncs(plan)


def _mark_partial(plan: Plan) -> None:
    partial = plan.derived.partial | plan.derived.sequence
    if plan.layout.sp and plan.structure is not None:
        for path, cut in plan.cuts.items():  # a row's bias is added to its split output
            if cut == "row" and plan.structure.index_of(path) is not None and f"{path}.bias" in plan.canonical:
                partial.add(plan.canonical[f"{path}.bias"])
    for name in partial:
        if not plan.placements[name].sharded:
            plan.placements[name] = replace(plan.placements[name], tp_gradient="partial")


def _without_inputs(plan: Plan) -> list[Problem]:
    """Nothing can be derived without a call; only pairs that speak for themselves are taken."""
    rows = {path.rpartition(".")[0] for path, cut in plan.cuts.items() if cut == "row"}
    problems = []
    for record in plan.records_of("shard"):
        path = record.path
        if plan.cuts.get(path) == "column" and path.rpartition(".")[0] not in rows:
            asked = any(r.path == path and r.arguments["mode"] == "fwd_post" for r in plan.records_of("sync"))
            if asked:
                plan.derived.gather.add(path)
                continue
            what = "nothing tells where the sharded output goes: no row-parallel linear stands beside it"
            remedy = 'pass build(..., inputs={...}) to have it derived, or call .sync("fwd_post", "all_gather")'
            problems.append(Problem(what, path, record.source, remedy))
    return problems + check_syncs(plan)
