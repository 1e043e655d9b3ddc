"""Derives what each sharded module communicates, and checks the user's ``sync`` calls against it."""

from __future__ import annotations

from megasched.analysis.tp.facts import Region
from megasched.errors import Problem
from megasched.plan.plan import Plan


def derived_syncs(plan: Plan, path: str) -> dict[str, str | None]:
    """Returns the collective over TP that one sharded module needs in each mode; None where it sends nothing.

    The pairs are Megatron's f and g (Shoeybi et al., arXiv 1909.08053) and, under sequence parallelism,
    their all-gather and reduce-scatter forms (Korthikanti et al., arXiv 2205.05198).
    """
    cut = plan.cuts[path]
    split = plan.splits_sequence(path)
    if cut == "column":
        return {
            "fwd_pre": "all_gather" if split else None,
            "fwd_post": "all_gather" if path in plan.tp_facts.gather else None,
            "bwd_post": "reduce_scatter" if split else "all_reduce",
        }
    if cut == "row":
        scatter = path in plan.tp_facts.scatter
        return {
            "fwd_pre": "scatter" if scatter else None,
            "fwd_post": "reduce_scatter" if split else "all_reduce",
            "bwd_post": "all_gather" if scatter else None,
        }
    return {"fwd_pre": None, "fwd_post": "all_reduce" if cut == "vocab" else None, "bwd_post": None}


def check_syncs(plan: Plan) -> list[Problem]:
    """Returns a problem for each ``sync`` on a sharded module that contradicts the derived collective."""
    problems = []
    for record in plan.records_of("sync"):
        if record.path not in plan.cuts:
            continue
        mode, op = record.arguments["mode"], record.arguments["op"]
        expected = derived_syncs(plan, record.path)[mode]
        if op == expected:
            continue
        asked = op if isinstance(op, str) else getattr(op, "__name__", "a function")
        cut = plan.cuts[record.path]
        what = f"sync({mode!r}, {asked!r}) contradicts the placement: a {cut}-sharded module here "
        what += f"needs {expected} at {mode}" if expected else f"sends nothing at {mode}"
        remedy = "leave the call out: what must be sent follows from the shards"
        problems.append(Problem(what, record.path, record.source, remedy))
    return problems


def shared_regions(plan: Plan) -> dict[str, Region]:
    """Returns the modules whose input enters the TP region once for all columns inside: path -> region.

    This pays off where several columns read the input, unless one matrix product computes them all and
    communicates by itself. Under sequence parallelism a module that views shards as heads needs it, as it reads
    the sequence length off its input. A module in which a whole tensor meets shards always needs it. Megatron's
    modules communicate by themselves.
    """
    split, by_megatron = plan.layout.sp, plan.by_megatron
    fused_columns = {frozenset(paths) for paths in plan.fused_columns}
    return {
        path: region
        for path, region in plan.tp_facts.regions.items()
        if path not in by_megatron
        and (
            path in plan.tp_facts.needed_regions
            or (len(region.columns) > 1 and frozenset(region.columns) not in fused_columns)
            or (split and not plan.tp_facts.by_heads.isdisjoint(region.columns))
        )
    }
