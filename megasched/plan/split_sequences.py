"""Plans how context and sequence parallelism split sequences, and how rows hold several (``--sft``)."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace
from functools import partial

from torch import nn

from megasched.analysis.analysis_cache import AnalysisCache
from megasched.analysis.cp.facts import CpFacts
from megasched.analysis.cp.packed_sequences import one_sequence_a_row, plan_packed
from megasched.definition.experts import find_experts
from megasched.errors import Problem, ScheduleError
from megasched.plan.plan import Plan


def plan_context(plan: Plan, model: nn.Module, runs: AnalysisCache) -> tuple[Plan, list[Problem]]:
    """Returns the plan with the facts of context parallelism, and the problems."""
    if plan.layout.cp == 1:
        return plan, []
    structure = plan.structure
    if structure is None:
        remedy = "run it through `python -m megasched pretrain_gpt.py`, or without context parallelism"
        what = "context parallelism is for Hugging Face's causal language models"
        return plan, [Problem(what, remedy=remedy)]
    refuse = partial(why_not_sequence_region, plan)
    sequence = runs.plan_sequence(model, structure, plan.layout.cp, refuse)
    plan = replace(plan, cp_facts=sequence)
    if sequence.problems:
        return plan, sequence.problems
    in_region = partial(_is_in, {*sequence.regions, *find_experts(model)})  # which take tokens one by one
    recorded = sequence.recorded
    by_length = runs.goes_by_length(model, structure, plan.layout.cp, in_region, places=False, gathered=recorded)
    if by_length is None:
        return plan, []
    path, operation = by_length
    what = f"context parallelism: {operation} goes by the length of the sequence, of which a rank sees a part"
    return plan, [Problem(what, path, remedy="run it without --context-parallel-size")]


def _is_in(regions: Container[str], path: str) -> bool:
    while path and path not in regions:
        path = path.rpartition(".")[0]
    return bool(path)


def refuse_split_layers(plan: Plan, model: nn.Module, runs: AnalysisCache) -> list[Problem]:
    """Returns a problem where sequence parallelism can't split what the layers of a model see.

    Code of the layers, and code between them, sees a part of the sequence, except in regions.
    """
    structure, remedy = plan.structure, "run it without sequence parallelism"
    if structure is None or not plan.layout.sp:
        return []
    if structure.repeated:
        what = "layers are called more than once, and sequence parallelism splits the hidden state at the first "
        what += "call of one and joins it after the last"
        return [Problem(what, structure.layers, remedy=remedy)]
    tp_facts = plan.tp_facts
    of_heads = {path for path, of in tp_facts.regions.items() if not tp_facts.by_heads.isdisjoint(of.columns)}
    regions = tp_facts.needed_regions | of_heads | set(find_experts(model))  # which take tokens one by one

    def is_outside(path: str) -> bool:
        return structure.index_of(path) is None

    found = runs.goes_by_length(
        model, structure, plan.layout.tp, partial(_is_in, regions), is_outside, places=True
    )
    if found is None:
        return []
    path, operation = found
    what = f"sequence parallelism: {operation} goes by the length of the sequence, of which a rank sees a part"
    return [Problem(what, path, remedy=remedy)]


def plan_packed_rows(plan: Plan, model: nn.Module, runs: AnalysisCache) -> tuple[Plan, list[Problem]]:
    """Returns the plan with the facts of rows that hold several sequences, and the problems.

    A definition that can't take such rows is no problem until one comes.
    """
    if not plan.layout.packed_sequences or plan.structure is None:
        return plan, []
    try:
        with one_sequence_a_row():
            sequence = runs.plan_sequence(model, plan.structure, 2, lambda path: "")
    except ScheduleError as error:  # it does not run on meta, so nothing is known of it
        sequence = CpFacts(problems=error.problems)
    packed = plan_packed(model, plan.structure, sequence)
    plan = replace(plan, packed=packed)
    by_megatron = plan.blocks | plan.attentions
    if not by_megatron or packed.problems:
        return plan, []
    what, remedy = "", "use level('fused')"
    if not packed.hands_on_bounds:
        what = "the definition does not tell its layers where sequences begin (cu_seq_lens_q)"
    elif plan.layout.sp and plan.layout.micro_batch_size > 1:
        what = "Megatron's attention takes packed sequences as one row, and sequence parallelism has split several"
        remedy = "--micro-batch-size 1 (and a longer --seq-length), or level('fused')"
    problem = Problem(f"level block under --sft: {what}", min(by_megatron), remedy=remedy)
    return plan, [problem] if what else []


def why_not_sequence_region(plan: Plan, path: str) -> str:
    """Returns why a module can't run on the whole sequence under context parallelism; empty where it can.

    Under sequence parallelism a row-parallel linear hands each TP rank a part of the sequence that it sees. Of the
    whole sequence that part has other tokens than of a context parallel rank's sequence.
    """
    structure, tp_facts = plan.structure, plan.tp_facts
    if structure is None or structure.index_of(path) is None:
        elsewhere = plan.layout.pp > 1 and plan.holds_parameters(path)
        return "its parameters are on one pipeline stage, and others run it, too" if elsewhere else ""
    if not plan.layout.sp:
        return ""
    rows = [row for row, cut in plan.cuts.items() if cut == "row" and row.startswith(f"{path}.")]
    split = [row for row in rows if row not in tp_facts.rows_inside]
    if path not in tp_facts.needed_regions or split:
        return "it can't have it under sequence parallelism too"
    return ""
