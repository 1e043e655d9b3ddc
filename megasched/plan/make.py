"""Turns the records of a schedule into a plan: placements, communication and problems.

The whole schedule is validated before anything is changed. All problems that a phase finds go into one report.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from megasched.analysis.analysis_cache import AnalysisCache
from megasched.analysis.stages.layer_stack import LayerStack
from megasched.collector import collector_paused
from megasched.definition.embeddings import ends_of
from megasched.errors import Problem, ScheduleError
from megasched.language.replacements import ReplacedNames
from megasched.language.schedule import Schedule
from megasched.plan.fp8 import choose_fp8
from megasched.plan.fused_columns import columns_to_fuse
from megasched.plan.images.channels import refuse_images
from megasched.plan.megatron.fit import MakeTrials
from megasched.plan.megatron.modules import choose_megatron_modules, mixture_problems, overlap_problems
from megasched.plan.plan import Plan
from megasched.plan.propagation import follow_cuts, with_sources
from megasched.plan.record_checks import (
    check_complete,
    check_expert_parallel,
    check_local_attributes,
    check_records,
    follow,
    hooked_parameters,
    hooks_on_all_modules,
    undecomposable,
    whole_logits,
)
from megasched.plan.shards import apply_shards
from megasched.plan.split_sequences import plan_context, plan_packed_rows


@collector_paused()
def make_plan(
    schedule: Schedule,
    *,
    model: nn.Module | None = None,
    inputs: Mapping[str, Any] | None = None,
    causal_lm: bool = False,
    vocab_multiple: int | None = None,
    structure: LayerStack | None = None,
    runs: AnalysisCache | None = None,
    trials: MakeTrials | None = None,
    replaced: ReplacedNames | None = None,
) -> Plan:
    """Validates a schedule and derives the whole plan from it; nothing writes to the plan afterwards.

    Args:
        schedule: provides the records and the layout.
        model: the definition after replacements; the schedule's own model by default.
        inputs: example arguments of the model's forward; token ids for a causal language model by default.
        causal_lm: an HF causal language model for Megatron's trainer: logits stay cut over the vocabulary up to
            the loss, and the layers must form a list.
        vocab_multiple: vocabularies are padded to a multiple of this; TP by default.
        structure: layer stack of a causal language model, where the caller has found it already.
        runs: cached runs of this model with that structure, from plans of other layouts.
        trials: makes the trials that compare Megatron's modules with the definition's; without it, of Megatron's
            only MLPs are used.
        replaced: what the replacements have made of names: a call on what they have moved holds there, and in the
            trainer a placement has the name in the definition.

    Raises:
        ScheduleError: with every problem found.
    """
    model = schedule.mod if model is None else model
    replaced, runs = replaced or ReplacedNames(), runs or AnalysisCache()
    plan = _undecided(schedule, replaced, model, structure)
    if causal_lm:
        plan = _with_ends(plan, schedule.root.mod, replaced)
    problems, shards = check_records(schedule, plan, model)
    plan, found = apply_shards(model, plan, shards, vocab_multiple or schedule.layout.tp)
    problems += found + check_expert_parallel(plan, model)
    problems += refuse_images(shards, plan, model, by_trainer=causal_lm, with_inputs=inputs is not None)
    problems += hooked_parameters(plan, model, by_trainer=causal_lm) + hooks_on_all_modules()
    _refuse(problems)

    plan, problems = follow_cuts(plan, model, inputs, causal_lm=causal_lm, runs=runs)
    problems += whole_logits(plan, model)
    problems += with_sources(plan, check_local_attributes(plan, model))
    _refuse(problems)

    plan, problems = plan_context(plan, model, runs)
    plan, found = choose_megatron_modules(plan, model, by_trainer=causal_lm, trials=trials)
    plan = replace(plan, fused_columns=columns_to_fuse(plan, model))
    plan, unpacked = plan_packed_rows(plan, model, runs)
    _refuse([*problems, *found, *unpacked])

    plan, problems = choose_fp8(plan)
    _refuse([*problems, *overlap_problems(plan), *mixture_problems(plan, model), *undecomposable(plan)])

    _refuse(check_complete(plan, model))
    return _named_as_in_hf(plan) if causal_lm else plan  # of others, whoever saves or fills names them


def _named_as_in_hf(plan: Plan) -> Plan:
    """Returns the plan with each placement under the name that its parameter has in the definition."""
    named = {name: replace(one, name=plan.renamed.get(name, one.name)) for name, one in plan.placements.items()}
    return replace(plan, placements=named)


def _undecided(
    schedule: Schedule, replaced: ReplacedNames, model: nn.Module, structure: LayerStack | None
) -> Plan:
    """Returns a plan of calls and roles, on the modules that they are about after the replacements."""
    records, roles = tuple(follow(schedule, replaced, model)), schedule.roles.moved(replaced.home)
    return Plan(
        schedule.layout,
        records,
        roles,
        canonical=_canonical_names(model),
        replaced=replaced,
        structure=structure,
    )


def _with_ends(plan: Plan, definition: nn.Module, replaced: ReplacedNames) -> Plan:
    """Returns the plan with the tables of embedding and head, by their names after the replacements."""
    first = _canonical_names(definition)

    def now(path: str | None) -> str | None:
        if path is None:
            return None
        table = first.get(f"{path}.weight")
        renamed = [own for own, name in replaced.renamed.items() if name == table]
        inside = [own for own in renamed if own.startswith(f"{path}.")]
        tied = sum(name == table for name in first.values()) > 1  # so that one may be the table of the other end
        names = [*inside, f"{replaced.home(path)}.weight", *([] if tied else renamed)]
        return next((own for own in names if own in plan.canonical), None)

    embedding, head = map(now, ends_of(definition))
    return replace(plan, ends=(embedding, head))


def _canonical_names(model: nn.Module) -> dict[str, str]:
    """Maps every name of every parameter to the first name of that parameter."""
    names: dict[int, str] = {id(parameter): name for name, parameter in model.named_parameters()}
    return {name: names[id(p)] for name, p in model.named_parameters(remove_duplicate=False)}


def _refuse(problems: Sequence[Problem]) -> None:
    if problems:
        raise ScheduleError(problems)
