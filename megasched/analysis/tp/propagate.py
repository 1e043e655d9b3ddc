"""Derives where activations are sharded, and what follows from it, from tapes and never from names.

The schedule says which linears and embeddings are cut. One forward of the definition, with a label at each tensor,
shows the rest: which replicated parameters meet sharded activations (their gradients are partial and must be
summed over TP), which outputs must be gathered because no later operation can take a shard, where a TP region
begins, and which dropouts must differ between ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from megasched.analysis.recording.sites import Site
from megasched.analysis.recording.tape import Tape
from megasched.analysis.rules.function_trials import FunctionTrials
from megasched.analysis.tp.facts import Region, TpAssumptions, TpFacts
from megasched.analysis.tp.joined_ways import join
from megasched.analysis.tp.module_calls import RecordedCalls
from megasched.analysis.tp.shared_inputs import columns_that_share, find_entries
from megasched.analysis.trials.ways import Way
from megasched.errors import Problem
from megasched.language.roles import Cut


def propagate(
    tape: Tape,
    assume: TpAssumptions,
    *,
    loss_takes_shards: bool = False,
    others: Sequence[tuple[Way, Tape]] = (),
    too_many: Sequence[Site] = (),
) -> TpFacts:
    """Labels a forward of each way through the code, and returns the facts that follow.

    Args:
        tape: tape of a trial batch of the definition, replacements made.
        assume: what is cut, and how. Which outputs must be gathered besides, and where regions are, is found out.
        loss_takes_shards: whether the loss function takes logits that are cut over the vocabulary.
        others: other ways through the code of its modules, with their tapes.
        too_many: questions with more ways than were looked at.
    """
    structure = assume.structure
    functions = FunctionTrials()
    without_rule: dict[str, set[str]] = defaultdict(set)
    while True:
        runs = []
        for each in (tape, *(other for _, other in others)):
            run = RecordedCalls(each, assume, functions, loss_takes_shards=loss_takes_shards)
            run.read()
            runs.append(run)
        entries = [find_entries(run.column_calls, run.other_uses, assume.cuts, structure) for run in runs]
        if assume.sequence_parallel and structure is not None and not structure.repeated:
            for run, found in zip(runs, entries, strict=True):
                run.want_lengths({column for region in found.values() for column in region.columns})
        further = _further(assume, runs)
        if further == assume:
            break
        for run in runs:
            for operator, paths in run.tp_facts.without_rule.items():
                without_rule[operator] |= paths
        assume = further
    for run, own in zip(runs, entries, strict=True):
        _close(run, own, assume.cuts)
    tp_facts = runs[0].tp_facts
    for (way, _), run in zip(others, runs[1:], strict=True):
        join(tp_facts, run.tp_facts, way, structure, split=assume.sequence_parallel)
    tp_facts.gather, tp_facts.rows_inside = dict(assume.gather), set(assume.rows_inside)
    tp_facts.without_rule = without_rule
    if too_many:
        places = ", ".join(str(site) for site in too_many)
        what = f"the values that {places} asks for decide on more ways through the code than are looked at"
        tp_facts.problems.append(Problem(what, remedy="run it without TP"))
    for name in sorted((tp_facts.partial | tp_facts.sequence) & tp_facts.complete):
        what = f"parameter {name} meets sharded activations in one place and whole ones in another"
        split = name in tp_facts.sequence
        remedy = "switch sequence parallelism off" if split else "shard the modules that use it alike"
        tp_facts.problems.append(Problem(what, remedy=remedy))
    return tp_facts


def _further(assume: TpAssumptions, runs: Sequence[RecordedCalls]) -> TpAssumptions:
    """Returns the assumptions of the next round, which equal ``assume`` where no run asks for more."""
    refused = assume.not_regions.union(*(run.not_regions for run in runs))
    asked = assume.regions.union(*(run.wanted_regions for run in runs))
    wanted_parts = {argument: part for run in runs for argument, part in run.parts.wanted.items()}
    # What was gathered for want of a region, or of a part, need not be with it.
    unsettled = any(run.wanted_regions for run in runs) or refused > assume.not_regions or wanted_parts
    gather = dict(assume.gather)
    for run in runs if not unsettled else ():
        gather = run.tp_facts.gather | gather
    return replace(
        assume,
        gather=gather,
        regions=asked - refused,
        not_regions=refused,
        rows_inside=assume.rows_inside.union(*(run.tp_facts.rows_inside for run in runs)),
        parts={**assume.parts, **wanted_parts},
    )


def _close(run: RecordedCalls, entries: dict[str, Region], cuts: Mapping[str, Cut]) -> None:
    """Sets a run's region entries and shared inputs, once no run asks for more."""
    run.tp_facts.regions = entries
    for path in run.tp_facts.needed_regions:
        columns = tuple(
            column for column in cuts if column in run.tp_facts.inside and column.startswith(path + ".")
        )
        entries[path] = Region(run.slots[path], columns)
    run.tp_facts.shared = columns_that_share(run.column_calls)
