"""Where activations are sharded, and what follows from it: derived from runs on meta, never from names.

The schedule says which linears and embeddings are cut. One forward of the definition, each tensor carrying
a label, tells the rest: which replicated parameters meet sharded activations (their gradients are partial
and must be summed over TP), which outputs must be gathered because nothing downstream can take a shard,
where a TP region begins, which dropouts must differ between ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from megasched.analysis.backward_code import watched_backward
from megasched.analysis.entries import columns_that_share, find_entries
from megasched.analysis.joined_ways import join
from megasched.analysis.labels import Region, TpFacts, TpSpec
from megasched.analysis.meta_call import call_hooks, can_set_loss, run_on_meta, tensors_in
from megasched.analysis.module_calls import RecordedCalls
from megasched.analysis.parts import ArgRef, ArgSlice
from megasched.analysis.structure import LayerStack
from megasched.analysis.ways import NO_OTHERS, InputsOf, Way, Ways
from megasched.definition import attention_interface
from megasched.errors import Problem
from megasched.language.roles import Cut


def propagate(
    model: nn.Module,
    inputs: Mapping[str, Any],
    cuts: Mapping[str, Cut],
    *,
    structure: LayerStack | None = None,
    sequence_parallel: bool = False,
    loss_takes_shards: bool = False,
    forked_by_user: frozenset[str] = frozenset(),
    gathered_by_user: frozenset[str] = frozenset(),
    components: Mapping[str, tuple[int, ...]] | None = None,
    heads: Mapping[str, tuple[int, ...]] | None = None,
    ways: Ways = NO_OTHERS,
    inputs_of: InputsOf | None = None,
) -> TpFacts:
    """Labels one forward of each way through the code, and says what follows.

    Args:
        model: a ``meta_copy`` of the definition, replacements made.
        inputs: arguments of its forward, tensors on meta.
        cuts: path -> how the linear or embedding there is cut.
        structure: where the layers are; needed for sequence parallelism.
        loss_takes_shards: the loss function takes logits that are cut over the vocabulary.
        forked_by_user: modules with a ``fork_rng`` record.
        gathered_by_user: column linears whose output the user wants gathered.
        components: path of a column linear -> sizes of the projections packed into its output.
        heads: path of one with fewer heads than ranks -> how many, for each of its components (``ShardDim``).
        ways: through the code of its modules.
        inputs_of: arguments by the length of a sequence, for ways that have one.
    """
    own_loss = structure is not None and structure.own_labels is not None
    gather = gathered_by_user
    regions: frozenset[str] = frozenset()
    not_regions: frozenset[str] = frozenset()
    rows_inside: frozenset[str] = frozenset()
    parts: dict[ArgRef, ArgSlice] = {}
    without_rule: dict[str, set[str]] = defaultdict(set)
    while True:
        known = (gather, forked_by_user, components or {}, regions, not_regions, rows_inside, parts)
        runs = [
            _labelled(
                RecordedCalls(model, cuts, structure, sequence_parallel, *known, heads, dict(way.answers)),
                model,
                inputs if way.length is None or inputs_of is None else inputs_of(way.length),
                loss_takes_shards,
                own_loss,
            )
            for way in (Way(), *ways.others)
        ]
        entries = [find_entries(run.column_calls, run.other_uses, cuts, structure) for run in runs]
        if sequence_parallel and structure is not None and not structure.repeated:
            for run, found in zip(runs, entries, strict=True):
                run.want_lengths({column for region in found.values() for column in region.columns})
        refused = not_regions.union(*(run.not_regions for run in runs))
        asked = regions.union(*(run.wanted_regions for run in runs))
        wanted_parts = {argument: part for run in runs for argument, part in run.parts.wanted.items()}
        # What was gathered for want of a region, or of a part, need not be with it.
        unsettled = any(run.wanted_regions for run in runs) or refused > not_regions or wanted_parts
        found = gather if unsettled else gather.union(*(run.derived.gather for run in runs))
        rows = rows_inside.union(*(run.derived.rows_inside for run in runs))
        wanted = asked - refused
        if (found, wanted, refused, rows) == (gather, regions, not_regions, rows_inside) and not wanted_parts:
            break
        for run in runs:
            for operator, paths in run.derived.without_rule.items():
                without_rule[operator] |= paths
        gather, regions, not_regions, rows_inside = found, wanted, refused, rows
        parts |= wanted_parts
    for run, own in zip(runs, entries, strict=True):
        _close(run, own, cuts)
    derived = runs[0].derived
    for way, run in zip(ways.others, runs[1:], strict=True):
        join(derived, run.derived, way, structure, split=sequence_parallel)
    derived.gather, derived.rows_inside, derived.without_rule = set(gather), set(rows_inside), without_rule
    if ways.too_many:
        places = ", ".join(str(site) for site in ways.too_many)
        what = f"the values that {places} asks for decide on more ways through the code than are looked at"
        derived.problems.append(Problem(what, remedy="run it without TP"))
    for name in sorted((derived.partial | derived.sequence) & derived.complete):
        what = f"parameter {name} meets sharded activations in one place and whole ones in another"
        split = name in derived.sequence
        remedy = "switch sequence parallelism off" if split else "shard the modules that use it alike"
        derived.problems.append(Problem(what, remedy=remedy))
    return derived


def _labelled(
    run: RecordedCalls, model: nn.Module, inputs: Mapping[str, Any], loss_takes_shards: bool, own_loss: bool
) -> RecordedCalls:
    """The same, once its forward has run."""
    for tensor in tensors_in(dict(inputs)):
        # A float input is an activation; what is made of ids alone (masks, positions) carries no gradient.
        run._set(tensor, TpSpec(fed=True, active=tensor.is_floating_point()))
    with (
        recorded_calls(model, run, takes_shards=loss_takes_shards, own_loss=own_loss),
        call_hooks(model, run.before, run.after),
        watched_backward(run.custom_function, run.hooked, run.packs),
    ):
        output = run_on_meta(model, inputs, run, autograd=True)
    if not loss_takes_shards:
        for tensor in tensors_in(output):
            run.derived.gather |= run.label(tensor).columns
    return run


def _close(run: RecordedCalls, entries: dict[str, Region], cuts: Mapping[str, Cut]) -> None:
    """What is known once no run wants another one."""
    run.derived.regions = entries
    for path in run.derived.needed_regions:
        columns = tuple(
            column for column in cuts if column in run.derived.inside and column.startswith(path + ".")
        )
        entries[path] = Region(run.slots[path], columns)
    run.derived.shared = columns_that_share(run.column_calls)


@contextmanager
def recorded_calls(model: nn.Module, run: RecordedCalls, *, takes_shards: bool, own_loss: bool = False) -> Any:
    """Stands in for HF's loss function, unless the definition's own code computes the loss: logits may stay
    sharded up to it if the real one takes shards.

    It also stands in for the attention function, to see how many heads a module hands over.
    """

    def loss(logits: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not takes_shards:
            run.derived.gather |= run.label(logits).columns
        with run._silently():
            found = logits.new_zeros(())
        run._set(found, TpSpec(active=True, fed=True))  # a forward may add to it what it makes of parameters
        return found

    def attend(module: nn.Module, query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        path = run.stack[-1][0]
        run.derived.attention[path] = (query.shape[1], run.label(query).region == "T")
        kwargs["dropout"] = 0.0  # drawn inside our attention function, which forks by itself
        return run.attend(real, module, query, *args, **kwargs)

    real = attention_interface.registered()
    if hasattr(model, "loss_function") and can_set_loss(model) and not own_loss:
        model.loss_function = loss
    with attention_interface.use_attention(attend):
        yield
