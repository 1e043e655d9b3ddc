"""From the records to a plan: how every parameter lies, what is communicated, what is wrong.

The whole schedule is validated before anything is changed; every problem found goes into one report.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from megasched.analysis.known_runs import KnownRuns
from megasched.analysis.labels import TpAssumptions
from megasched.analysis.layer_stack import LayerStack
from megasched.analysis.replay import Rank
from megasched.analysis.stock import is_theirs
from megasched.analysis.structure import find_layer_stack
from megasched.definition.experts import find_experts, not_apart
from megasched.errors import Problem, ScheduleError
from megasched.language.records import Record
from megasched.language.registry import get_primitive
from megasched.language.roles import Roles
from megasched.language.schedule import Schedule
from megasched.lowering.records import is_lowered
from megasched.plan.communication import check_syncs
from megasched.plan.fp8 import choose_fp8
from megasched.plan.fused_columns import join_columns
from megasched.plan.megatron_modules import choose_blocks, mixture_problems, overlap_problems
from megasched.plan.pairs import take_pairs
from megasched.plan.plan import Plan
from megasched.plan.record_checks import check_local_attributes, check_sliced_args, sharded_attention
from megasched.plan.shards import leave_whole, place
from megasched.plan.split_sequences import plan_context, plan_packed_rows, refuse_by_length
from megasched.plan.unmet import like_those_met


def make_plan(
    schedule: Schedule,
    *,
    model: nn.Module | None = None,
    inputs: Mapping[str, Any] | None = None,
    causal_lm: bool = False,
    vocab_multiple: int | None = None,
    structure: LayerStack | None = None,
    runs: KnownRuns | None = None,
) -> Plan:
    """Validates a schedule and derives everything from it.

    Args:
        schedule: the records; its layout counts.
        model: the definition after replacements; the schedule's own model by default.
        inputs: example arguments of the model's forward; token ids for a causal language model by default.
        causal_lm: an HF causal language model for Megatron's trainer: logits stay cut over the vocabulary
            up to the loss, and the layers must form a list.
        vocab_multiple: vocabularies are padded to a multiple of this; TP by default.
        structure: how the model runs, where the caller has found it already; for a causal language model alone.
        runs: of this model with that structure, from plans of other layouts.

    Raises:
        ScheduleError: with every problem found.
    """
    model = schedule.mod if model is None else model
    runs = runs or KnownRuns()
    plan = Plan(schedule.layout, list(schedule.records), structure=structure)
    names: dict[int, str] = {id(p): name for name, p in model.named_parameters()}
    plan.canonical = {name: names[id(p)] for name, p in model.named_parameters(remove_duplicate=False)}
    problems, shards = _check_records(schedule, model)
    problems += place(schedule, model, plan, shards, vocab_multiple or schedule.layout.tp)
    problems += _check_expert_parallel(plan, model) + _hooked_parameters(plan, model, by_trainer=causal_lm)
    problems += _hooks_on_all_modules()
    if not problems:
        problems += _derive(model, plan, inputs, causal_lm, runs, schedule.roles)
        problems += _with_sources(plan, check_local_attributes(schedule.roles, model, plan))
    if not problems:
        problems += plan_context(plan, model, runs)
        problems += choose_blocks(plan, model, schedule.roles, by_trainer=causal_lm)
        join_columns(plan, model)
        problems += plan_packed_rows(plan, model, runs)
        problems = problems or [
            *choose_fp8(plan, schedule.roles),
            *overlap_problems(plan),
            *mixture_problems(plan, model, schedule.roles),
        ]
    if problems:
        raise ScheduleError(problems)
    return plan


def _check_records(schedule: Schedule, model: nn.Module) -> tuple[list[Problem], list[Record]]:
    """What is wrong with each record by itself, and the shards of which nothing is."""
    problems: list[Problem] = []
    sound: dict[tuple[str, str], Record] = {}
    paths = {path for path, _ in model.named_modules(remove_duplicate=False)}
    for record in schedule.records:
        found = _check_record(schedule, record, paths)
        if record.primitive == "shard" and not found:
            key = (record.path, record.arguments["param"])
            first = sound.setdefault(key, record)
            if first is not record:
                axis = first.arguments["axis"]
                what = f"{key[1]} is sharded twice: along axis {axis} at {first.source}, and again"
                found = [Problem(what, record.path, record.source, "remove one of the two calls")]
        problems += found
    return problems, list(sound.values())


def _check_record(schedule: Schedule, record: Record, paths: Container[str]) -> list[Problem]:
    primitive = get_primitive(record.primitive)
    if not is_lowered(record.primitive):
        remedy = f'register one with @megasched.register_lowering("{record.primitive}")'
        return [Problem(f"primitive {record.primitive!r} has no lowering", record.path, record.source, remedy)]
    # An annotation travels with its parameter; replacements are made before anything else.
    if record.path not in paths and record.primitive not in ("replace", "replace_all", "annotate"):
        what = f"{record.primitive}: there is no such module any more after the replacements"
        return [Problem(what, record.path, record.source, "call it on a module that stays")]
    node = schedule.root[record.path] if record.path else schedule.root
    return primitive.check(node, record.arguments, record.source)


def _check_expert_parallel(plan: Plan, model: nn.Module) -> list[Problem]:
    """Expert parallelism with nothing to share out is a mistake."""
    ep, experts = plan.layout.ep, find_experts(model)
    if ep == 1 or plan.experts:
        return []
    what = f"EP {ep}, and no experts are shared out"
    if not experts and (alike := not_apart(model)):
        path, reason = next(iter(alike.items()))
        what += (
            f": this {type(model.get_submodule(path)).__name__} has the form that HF gives experts, but {reason}"
        )
        return [Problem(what, path, remedy="leave --expert-model-parallel-size at 1")]
    if not experts:
        what += ": the model has no module of the form that HF gives experts"
        return [Problem(what, remedy="leave --expert-model-parallel-size at 1")]
    first = next(iter(experts))
    name = next(name for name, _ in model.get_submodule(first).named_parameters())
    return [Problem(what, first, remedy=f'sch["{first}"].shard("{name}", axis=0), for every layer')]


def _hooked_parameters(plan: Plan, model: nn.Module, *, by_trainer: bool) -> list[Problem]:
    """A hook that a definition registers on a parameter as it is made would see a rank's gradient, or, in the
    trainer, which has parameters of its own, none."""
    if not by_trainer and plan.layout.tp == 1:
        return []
    hooked = [
        name
        for name, parameter in model.named_parameters()
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None)
    ]
    what = "a hook on the gradient of its parameter {}, which a run has another tensor for"
    remedy = "have the forward do the same, by an autograd function on what it makes of the parameter"
    return [
        Problem(what.format(name.rpartition(".")[2]), name.rpartition(".")[0], remedy=remedy) for name in hooked
    ]


def _hooks_on_all_modules() -> list[Problem]:
    """Hooks that code has registered on every module there is: in a run some of these are others."""
    tables = ("forward_pre_hooks", "forward_hooks", "backward_pre_hooks", "backward_hooks")
    hooks = [hook for table in tables for hook in getattr(torch.nn.modules.module, f"_global_{table}").values()]
    names = [getattr(hook, "__qualname__", type(hook).__name__) for hook in hooks if not is_theirs(hook)]
    if not names:
        return []
    what = f"a hook on all modules of the process is registered ({', '.join(names)}), and a run has others"
    return [Problem(what, remedy="register it on the modules of the definition that it is for")]


def _derive(
    model: nn.Module,
    plan: Plan,
    inputs: Mapping[str, Any] | None,
    causal_lm: bool,
    runs: KnownRuns,
    roles: Roles,
) -> list[Problem]:
    """Structure, propagation, and what of it goes into the placements."""
    problems: list[Problem] = []
    like: dict[str, str] = {}
    try:
        if causal_lm:
            plan.structure = plan.structure or find_layer_stack(model)
            inputs = plan.structure.trial_inputs() if inputs is None else inputs
        if plan.cuts and inputs is None:
            return take_pairs(plan, model) + check_syncs(plan)
        spread = plan.cuts or plan.layout.sp or plan.layout.cp > 1
        if inputs is not None and (spread or plan.records_of("replace", "replace_all")):
            _propagate(model, plan, inputs, causal_lm, runs, roles)
            problems = _settle_gathered(plan)
            like, unknown = like_those_met(plan, model, inputs)
            problems += [*unknown, *refuse_by_length(plan, model, runs)]
        several = plan.layout.world_size > 1
        if inputs is not None and (plan.cuts or causal_lm or several):
            problems += runs.why_seen(model, inputs, plan.cuts, regions=several)
        if inputs is not None and several:
            problems += runs.why_not_alike(model, inputs)
        if inputs is not None and max(plan.layout.data_parallel_size, plan.layout.cp) > 1:
            problems += runs.why_by_scale(model, inputs, plan.structure)
    except ScheduleError as error:
        return _with_sources(plan, error.problems)
    _mark_partial(plan, like)
    of_tp = plan.derived.problems if plan.layout.tp > 1 else []
    found = [*problems, *of_tp, *check_sliced_args(plan), *_experts_read_elsewhere(plan)]
    return _with_sources(plan, found) + check_syncs(plan)


def _propagate(
    model: nn.Module, plan: Plan, inputs: Mapping[str, Any], causal_lm: bool, runs: KnownRuns, roles: Roles
) -> None:
    """What follows from the cuts goes into the plan; columns of which it is not proven that a part will do are
    gathered."""
    forked = frozenset(record.path for record in plan.records_of("fork_rng"))
    gather = frozenset(
        record.path
        for record in plan.records_of("sync")
        if plan.cuts.get(record.path) == "column"
        and (record.arguments["mode"], record.arguments["op"]) == ("fwd_post", "all_gather")
    )
    own_loss = plan.structure is not None and plan.structure.loss_labels is not None
    if own_loss and plan.structure is not None:  # what its code makes the loss of is whole
        gather |= {path for path in plan.structure.after if plan.cuts.get(path) == "column"}
    while True:
        assume = TpAssumptions(
            dict(plan.cuts),
            plan.structure,
            sequence_parallel=plan.layout.sp and causal_lm,
            gather=gather,
            forked_by_user=forked,
            components={path: _components(plan, path) for path in plan.cuts},
            heads={path: heads.of_components for path, heads in plan.replicated_heads.items()},
        )
        plan.derived = runs.propagate(model, inputs, assume, loss_takes_shards=causal_lm and not own_loss)
        elsewhere = plan.derived.read_elsewhere
        if read := {path: elsewhere[path] for path in sorted(elsewhere.keys() & plan.cuts.keys())}:
            leave_whole(plan, {path: _why_whole(reader) for path, reader in read.items()})
            continue
        unproven = _unproven_sizes(plan, runs, assume, roles) - plan.derived.gather
        if not unproven:
            read = runs.sizes_read(model, inputs, _sizes_on_a_rank(plan))
            if not read:
                return
            leave_whole(
                plan, dict.fromkeys(sorted(read), "code other than its own goes by the size of its weight")
            )
        gather = frozenset(path for path in gather | unproven if path in plan.cuts)


def _sizes_on_a_rank(plan: Plan) -> dict[str, dict[str, tuple[int, ...]]]:
    """Linears and embeddings of which a rank has other sizes -> name of a parameter -> its shape there."""
    shapes: dict[str, dict[str, tuple[int, ...]]] = {}
    for path in plan.cuts:
        for name in ("weight", "bias"):
            canonical = plan.canonical.get(f"{path}.{name}" if path else name)
            placement = None if canonical is None else plan.placements[canonical]
            if placement is not None and (shape := placement.local_shape(plan.layout.tp)) != placement.shape:
                shapes.setdefault(path, {})[name] = shape
    return shapes


def _why_whole(reader: str) -> str:
    return f"its weight is read by code other than its own, {f'of {reader}' if reader else 'of the model'}"


def _experts_read_elsewhere(plan: Plan) -> list[Problem]:
    """Of experts that are shared out a rank has a part, and no other code is made to know that."""
    read = plan.derived.read_elsewhere
    remedy = "leave --expert-model-parallel-size at 1"
    return [Problem(_why_whole(read[path]), path, remedy=remedy) for path in sorted(plan.experts & read.keys())]


def _unproven_sizes(plan: Plan, runs: KnownRuns, assume: TpAssumptions, roles: Roles) -> set[str]:
    """Columns that stay cut, and of whose sizes the code that follows may make something else on a rank."""
    settled = plan.derived.gather | plan.derived.scatter
    cuts = {path: cut for path, cut in plan.cuts.items() if path not in settled}
    if plan.layout.tp == 1:  # all sizes are the definition's own, but for a vocabulary that is padded
        cuts = {path: cut for path, cut in cuts.items() if cut == "column" and _is_padded(plan, path)}
    rank = Rank(max(2, plan.layout.tp), cuts, assume.components, assume.heads)
    sharded = sharded_attention(plan)
    counts = {path: names for path, names in roles.local_attributes.items() if sharded(path)}
    return runs.unproven_sizes(plan.derived, rank, plan.cuts, counts)


def _is_padded(plan: Plan, path: str) -> bool:
    weight = plan.placement(path, "weight")
    return weight.padded is not None and weight.padded != weight.shape[weight.axis or 0]


def _components(plan: Plan, path: str) -> tuple[int, ...]:
    """Sizes of the projections packed into the output of a linear that is cut."""
    heads = plan.replicated_heads.get(path)
    return plan.placement(path, "weight").components if heads is None else heads.components


def _settle_gathered(plan: Plan) -> list[Problem]:
    """What is gathered is cut in one piece, or it would come back in another order; heads play no part then."""
    problems = []
    for path in sorted(plan.derived.gather):
        if plan.cuts[path] == "features":
            what = "what follows needs the whole of what is looked up, and each rank has some of its features"
            problems.append(Problem(what, path, remedy="leave it whole, or cut it along its rows (axis 0)"))
            continue
        heads = plan.replicated_heads.pop(path, None)
        for name in ("weight", "bias"):
            canonical = plan.canonical.get(f"{path}.{name}" if path else name)
            if canonical is None:
                continue
            placement = replace(plan.placements[canonical], components=())
            if heads is not None:
                axis = 1 if placement.transposed and len(placement.shape) > 1 else 0
                placement = replace(placement, axis=axis, tp_gradient="complete")
                if placement.shape[axis] % plan.layout.tp:
                    what = f"TP {plan.layout.tp} does not divide {name} {list(placement.shape)}, which is gathered"
                    problems.append(Problem(what, path, remedy="leave it whole"))
            plan.placements[canonical] = placement
    return problems


def _with_sources(plan: Plan, problems: Sequence[Problem]) -> list[Problem]:
    """Problems that a trial call showed, each with the schedule call that stands nearest to its module."""
    records = plan.records_of("shard", "replace", "replace_all")
    return [replace(problem, source=problem.source or _nearest(records, problem.module)) for problem in problems]


def _nearest(records: Sequence[Record], path: str) -> str:
    """Source of a record on the module, or else around it, below it or beside it; the root is around all."""
    while True:
        inside = path + "." if path else ""
        for record in records:
            if record.path == path or record.path.startswith(inside):
                return record.source
        if not path:
            return ""
        path = path.rpartition(".")[0]


def _mark_partial(plan: Plan, like: Mapping[str, str]) -> None:
    """
    Args:
        like: what was not met -> what it is like.
    """
    partial = plan.derived.partial | plan.derived.sequence
    partial |= {name for name, other in like.items() if other in partial}
    if plan.layout.sp and plan.structure is not None:
        for path, cut in plan.cuts.items():  # a row's bias is added to its split output
            split = plan.structure.index_of(path) is not None and path not in plan.derived.rows_inside
            if cut == "row" and split and f"{path}.bias" in plan.canonical:
                partial.add(plan.canonical[f"{path}.bias"])
    for name in partial:
        if not plan.placements[name].sharded:
            plan.placements[name] = replace(plan.placements[name], tp_gradient="partial")
