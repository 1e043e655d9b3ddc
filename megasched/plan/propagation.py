"""Derives what follows from the cuts: gathers, partial gradients, and cuts that are dropped again.

A run on meta shows it, and is evaluated again as long as the result changes the cuts. The run does not reach
parameters that values choose among (experts in a list). Such a parameter takes its kind of gradient over TP from
one that was reached, in the same list and of the same class, where both are whole. Without one it is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from megasched.analysis.analysis_cache import AnalysisCache
from megasched.analysis.find_layer_stack import find_layer_stack
from megasched.analysis.recording.meta_call import meta_copy, tensors_in, to_meta
from megasched.analysis.tp.facts import TpAssumptions
from megasched.analysis.tp.replay import Rank
from megasched.analysis.trials.choices import counterparts
from megasched.analysis.trials.reach import find_reach
from megasched.errors import Problem, ScheduleError
from megasched.language.records import Record
from megasched.plan.communication import check_syncs
from megasched.plan.images.channels import (
    channels_left_whole,
    cut_channels,
    refuse_whole_inputs,
    uneven_groups,
)
from megasched.plan.pairs import reads_tensors_of, take_pairs
from megasched.plan.placement import Placement
from megasched.plan.plan import Plan
from megasched.plan.record_checks import check_sliced_args, sharded_attention
from megasched.plan.shards import leave_whole
from megasched.plan.split_sequences import refuse_split_layers


def follow_cuts(
    plan: Plan,
    model: nn.Module,
    inputs: Mapping[str, Any] | None,
    *,
    causal_lm: bool,
    runs: AnalysisCache,
) -> tuple[Plan, list[Problem]]:
    """Returns the plan with its layers and all that follows from the cuts, and the problems found.

    Args:
        inputs: example arguments of the model's forward; without them only pairs of a column and a row linear in
            one module are taken.
        runs: cached runs of the model on meta.
    """
    problems: list[Problem] = []
    like: dict[str, str] = {}
    try:
        if causal_lm:
            structure = plan.structure or find_layer_stack(model)
            plan = replace(plan, structure=structure)
            inputs = structure.trial_inputs() if inputs is None else inputs
        if plan.cuts and inputs is None:
            tp_facts, problems = take_pairs(plan, model)
            plan = replace(plan, tp_facts=tp_facts)
            return plan, problems + check_syncs(plan, lambda path: None)
        spread = plan.cuts or plan.layout.sp or plan.layout.cp > 1
        if inputs is not None and (spread or plan.records_where(lambda primitive: primitive.replaces_modules)):
            plan, problems = _propagate(model, plan, inputs, causal_lm, runs)
            plan, uneven = _lay_out_gathered(plan)
            problems += uneven
            like, unknown = _like_those_met(plan, model, inputs)
            problems += [*unknown, *refuse_split_layers(plan, model, runs)]
        several = plan.layout.world_size > 1
        if inputs is not None and (plan.cuts or causal_lm or several):
            problems += runs.why_seen(model, inputs, plan.cuts, regions=several)
        if inputs is not None and several:
            problems += runs.why_calls_differ(model, inputs)
        if inputs is not None and max(plan.layout.data_parallel_size, plan.layout.cp) > 1:
            problems += runs.why_by_scale(model, inputs, plan.structure)
    except ScheduleError as error:
        return plan, with_sources(plan, error.problems)
    plan = replace(plan, placements=_with_partial_gradients(plan, like))
    of_tp = plan.tp_facts.problems if plan.layout.tp > 1 else []
    problems = [*problems, *of_tp, *check_sliced_args(plan), *_experts_read_elsewhere(plan)]
    return plan, with_sources(plan, problems) + check_syncs(plan, partial(_dims_of, plan, model, inputs, runs))


def _dims_of(
    plan: Plan, model: nn.Module, inputs: Mapping[str, Any] | None, runs: AnalysisCache, path: str
) -> int | None:
    """Returns how many dimensions the output of a module has; None where no run has reached it."""
    calls = () if inputs is None else runs.tape_of(model, inputs, plan.structure).calls()
    return next((tensors_in(call.output)[0].dim() for call in calls if call.path == path), None)


def _propagate(
    model: nn.Module, plan: Plan, inputs: Mapping[str, Any], causal_lm: bool, runs: AnalysisCache
) -> tuple[Plan, list[Problem]]:
    """Returns the plan with the facts of its cuts, and problems of what can't be cut by channels.

    Columns are gathered unless shards are proven to suffice.
    """
    forked = frozenset(record.path for record in plan.records_of("fork_rng"))
    gather = {
        record.path: f"the schedule asks for it, {record.source}"
        for record in plan.records_of("sync")
        if plan.cuts.get(record.path) == "column"
        and (record.arguments["mode"], record.arguments["op"]) == ("fwd_post", "all_gather")
    }
    own_loss = plan.structure is not None and plan.structure.loss_labels is not None
    if own_loss and plan.structure is not None:  # what its code makes the loss of is whole
        made_of = [path for path in plan.structure.after if plan.cuts.get(path) == "column"]
        gather |= dict.fromkeys(made_of, "the definition's own code makes the loss of it")
    readers = {path: reads_tensors_of(model, path, of_torch=True) for path in plan.cuts}
    plan = leave_whole(plan, {path: _why_whole(reader) for path, reader in readers.items() if reader is not None})
    channels = channels_left_whole(plan, model, by_trainer=causal_lm)
    while True:
        cuts = {path: cut for path, cut in plan.cuts.items() if cut != "channels"}
        assume = TpAssumptions(
            cuts,
            plan.structure,
            sequence_parallel=plan.layout.sp and plan.structure is not None,
            gather=gather,
            forked_by_user=forked,
            components={path: _components(plan, path) for path, cut in cuts.items() if cut != "row"},
            heads={path: heads.of_components for path, heads in plan.replicated_heads.items()},
            channels_whole=frozenset(channels),
        )
        takes_shards = (causal_lm or plan.layout.parallel_output) and not own_loss
        plan = replace(plan, tp_facts=runs.propagate(model, inputs, assume, loss_takes_shards=takes_shards))
        elsewhere = plan.tp_facts.read_elsewhere
        met = plan.tp_facts.input_components.keys() - cuts
        if uneven := (uneven_groups(plan, model) | elsewhere.keys()) & met:
            channels |= uneven
            continue
        plan = cut_channels(plan, model)
        if read := {path: elsewhere[path] for path in sorted(elsewhere.keys() & plan.cuts.keys())}:
            plan = leave_whole(plan, {path: _why_whole(reader) for path, reader in read.items()})
            continue
        if rows := plan.tp_facts.rows_of_tokens & plan.cuts.keys():
            what = (
                "it takes whole features, and under sequence parallelism a rank has its part of the tokens already"
            )
            plan = leave_whole(plan, dict.fromkeys(sorted(rows), what))
            continue
        unproven = _unproven_sizes(plan, runs, assume) - plan.tp_facts.gather.keys()
        if not unproven:
            sizes_read = runs.sizes_read(model, inputs, _sizes_on_a_rank(plan))
            if not sizes_read:
                return plan, refuse_whole_inputs(plan, model, channels)
            channels |= sizes_read & met
            what = "code other than its own goes by the size of its weight"
            plan = leave_whole(plan, dict.fromkeys(sorted(sizes_read - met), what))
        gather |= dict.fromkeys(sorted(unproven), "code that reads it goes by a size of which a rank has a part")
        gather = {path: why for path, why in gather.items() if path in plan.cuts}


def _sizes_on_a_rank(plan: Plan) -> dict[str, dict[str, tuple[int, ...]]]:
    """Maps linears and embeddings with other sizes on a rank to {name of a parameter: its shape there}."""
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
    """Returns a problem for each module of shared-out experts whose weights other code reads as a whole."""
    read = plan.tp_facts.read_elsewhere
    remedy = "leave --expert-model-parallel-size at 1"
    experts = sorted(plan.experts.keys() & read.keys())
    return [Problem(_why_whole(read[path]), path, remedy=remedy) for path in experts]


def _unproven_sizes(plan: Plan, runs: AnalysisCache, assume: TpAssumptions) -> set[str]:
    """Returns the cut columns after which code may depend on a size that differs on a rank."""
    settled = plan.tp_facts.gather.keys() | plan.tp_facts.scatter
    cuts = {path: cut for path, cut in plan.cuts.items() if path not in settled}
    if plan.layout.tp == 1:  # all sizes are the definition's own, but for a vocabulary that is padded
        cuts = {path: cut for path, cut in cuts.items() if cut == "column" and _is_padded(plan, path)}
    rank = Rank(max(2, plan.layout.tp), cuts, assume.components, assume.heads)
    sharded = sharded_attention(plan)
    counts = {path: names for path, names in plan.roles.local_attributes.items() if sharded(path)}
    return runs.unproven_sizes(plan.tp_facts, rank, plan.cuts, counts)


def _is_padded(plan: Plan, path: str) -> bool:
    weight = plan.placement(path, "weight")
    return weight.padded is not None and weight.padded != weight.shape[weight.axis or 0]


def _components(plan: Plan, path: str) -> tuple[int, ...]:
    """Returns the sizes of the projections packed into the output of a cut linear."""
    heads = plan.replicated_heads.get(path)
    return plan.placement(path, "weight").components if heads is None else heads.components


def _lay_out_gathered(plan: Plan) -> tuple[Plan, list[Problem]]:
    """Returns the plan with gathered columns cut in one piece, not by components or heads, and the problems.

    Cut by components, their output would come back in another order.
    """
    problems, placements = [], dict(plan.placements)
    for path in sorted(plan.tp_facts.gather):
        if plan.cuts[path] == "features":
            what = "what follows needs the whole of what is looked up, and each rank has some of its features"
            problems.append(Problem(what, path, remedy="leave it whole, or cut it along its rows (axis 0)"))
            continue
        for name in ("weight", "bias"):
            canonical = plan.canonical.get(f"{path}.{name}" if path else name)
            if canonical is None:
                continue
            placement = replace(placements[canonical], components=())
            if path in plan.replicated_heads:
                axis = 1 if placement.transposed and len(placement.shape) > 1 else 0
                placement = replace(placement, axis=axis, tp_gradient="complete")
                if placement.shape[axis] % plan.layout.tp:
                    what = f"TP {plan.layout.tp} does not divide {name} {list(placement.shape)}, which is gathered"
                    problems.append(Problem(what, path, remedy="leave it whole"))
            placements[canonical] = placement
    gathered = {path for path in plan.tp_facts.gather if plan.cuts[path] != "features"}
    heads = {path: of for path, of in plan.replicated_heads.items() if path not in gathered}
    return replace(plan, placements=placements, replicated_heads=heads), problems


def with_sources(plan: Plan, problems: Sequence[Problem]) -> list[Problem]:
    """Returns the problems of trial calls, each with the source of the schedule call nearest to its module."""
    records = plan.records_where(lambda primitive: primitive.name == "shard" or primitive.replaces_modules)
    return [replace(problem, source=problem.source or _nearest(records, problem.module)) for problem in problems]


def _nearest(records: Sequence[Record], path: str) -> str:
    """Returns the source of a record on the module, or else below, around or beside it; the root is around all."""
    while True:
        inside = path + "." if path else ""
        for record in records:
            if record.path == path or record.path.startswith(inside):
                return record.source
        if not path:
            return ""
        path = path.rpartition(".")[0]


def _with_partial_gradients(plan: Plan, like: Mapping[str, str]) -> dict[str, Placement]:
    """Returns the placements, with those parameters marked whose gradient is partial on each TP rank.

    Args:
        like: parameter that no run reached -> one that stands in for it.
    """
    placements = dict(plan.placements)
    partial = plan.tp_facts.partial | plan.tp_facts.sequence
    partial |= {name for name, other in like.items() if other in partial}
    if plan.layout.sp and plan.structure is not None:
        for path, cut in plan.cuts.items():  # a row's bias is added to its split output
            split = plan.structure.index_of(path) is not None and path not in plan.tp_facts.rows_inside
            if cut == "row" and split and f"{path}.bias" in plan.canonical:
                partial.add(plan.canonical[f"{path}.bias"])
    for name in partial:
        if not placements[name].sharded:
            placements[name] = replace(placements[name], tp_gradient="partial")
    return placements


def _like_those_met(
    plan: Plan, model: nn.Module, inputs: Mapping[str, Any]
) -> tuple[dict[str, str], list[Problem]]:
    """Maps each parameter that no run reached to one that stands in for it; a problem where there is none.

    Args:
        model: model of the labelled run.
        inputs: arguments of that run.
    """
    met, trained = plan.tp_facts.readers, {name for name, p in model.named_parameters() if p.requires_grad}
    unmet = {name for name in plan.placements if name in trained and name not in met}
    if plan.layout.tp == 1 or not unmet:
        return {}, []
    with_loss = plan.structure is not None and plan.structure.takes_labels
    reach = find_reach(meta_copy(model), to_meta(dict(inputs)), with_loss=with_loss)
    found, problems = dict[str, str](), dict[str, Problem]()
    for name in (name for name in reach.perhaps if name in unmet):
        twin = _met_twin(plan, model, name)
        path = name.rpartition(".")[0]
        if twin is not None and path not in plan.cuts:
            found[name] = twin
        else:
            problems.setdefault(path, _unknown_gradient(path))
    return found, list(problems.values())


def _met_twin(plan: Plan, model: nn.Module, name: str) -> str | None:
    """Returns the first parameter of the same kind that a run reached, where both are whole; None without one."""
    others: Iterable[str] = (other for _, other in counterparts(model, name))
    whole = not plan.placements[name].sharded
    return next(
        (o for o in others if o in plan.tp_facts.readers and whole and not plan.placements[o].sharded),
        None,
    )


def _unknown_gradient(path: str) -> Problem:
    what = "values decide whether it is called, no trial has met it, and how its gradient is made up over TP is "
    what += "not known"
    return Problem(what, path, remedy="leave all modules of its list whole, or run it without TP")
