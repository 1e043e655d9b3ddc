"""Derives what each sharded module communicates, and checks the user's ``sync`` calls against it."""

from __future__ import annotations

from collections.abc import Callable

from megasched.analysis.tp.facts import Region
from megasched.errors import Problem, some_of
from megasched.language.primitives.sync import ALONG_AN_AXIS
from megasched.language.records import Record
from megasched.plan.plan import Plan

_SUMS = ("all_reduce", "reduce_scatter")
# How a module is cut, where it communicates, and the collective there, if that is along the sequence: [b, s, h].
_OF_SEQUENCES = (
    ("column", "fwd_pre", "all_gather"),
    ("column", "bwd_post", "reduce_scatter"),
    ("row", "fwd_post", "reduce_scatter"),
)


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
        stays = path in plan.tp_facts.rows_inside and not plan.in_block(path)  # in a region, whole
        return {
            "fwd_pre": "scatter" if scatter else None,
            "fwd_post": "reduce_scatter" if split and not stays else "all_reduce",
            "bwd_post": "all_gather" if scatter else None,
        }
    return {"fwd_pre": None, "fwd_post": "all_reduce" if cut == "vocab" else None, "bwd_post": None}


def check_syncs(plan: Plan, dims: Callable[[str], int | None]) -> list[Problem]:
    """Returns a problem for each ``sync`` that contradicts the derived collective or its axis.

    Args:
        dims: maps the path of a module to how many dimensions its output has; None where that is not known.
    """
    problems = []
    for record in plan.records_of("sync"):
        refusal = _refusal(plan, record, dims) if record.path in plan.cuts else _twice(plan, record)
        if refusal is not None:
            problems.append(Problem(refusal[0], record.path, record.source, refusal[1]))
    return problems


def _refusal(plan: Plan, record: Record, dims: Callable[[str], int | None]) -> tuple[str, str] | None:
    """Returns what is wrong with a ``sync`` on a sharded module, and what would be right; None if it is right."""
    mode, op, cut = record.arguments["mode"], record.arguments["op"], plan.cuts[record.path]
    expected = derived_syncs(plan, record.path)[mode]
    if op != expected:
        asked = op if isinstance(op, str) else getattr(op, "__name__", "a function")
        what = f"sync({mode!r}, {asked!r}) contradicts the placement: a {cut}-sharded module here "
        what += f"needs {expected} at {mode}" if expected else f"sends nothing at {mode}"
        remedy = "leave the call out: what must be sent follows from the shards"
        if callable(op):
            remedy += "; what else the function does belongs into hook()"
        elif not plan.layout.sp and (cut, mode, op) in _OF_SEQUENCES:
            remedy += ", and sequence parallelism alone cuts sequences"
        return what, remedy
    if "axis" not in record.arguments:
        return None
    axis, count, of_sequence = record.arguments["axis"], dims(record.path), (cut, mode, op) in _OF_SEQUENCES
    right = {1, 1 - count if count else 1} if of_sequence else {-1, count - 1 if count else -1}
    if axis in right:
        return None
    shape = f", and its output has {count} dimensions" if count else ""
    what = f"sync({mode!r}, {op!r}, axis={axis}): this module sends along the "
    what += f"{'sequence' if of_sequence else 'features'}{shape}"
    return what, f"axis={1 if of_sequence else -1}, or no axis"


def _twice(plan: Plan, record: Record) -> tuple[str, str] | None:
    """Returns what is wrong with a ``sync`` of what is sent anyway, inside of the module or of sequences."""
    mode, op, axis = record.arguments["mode"], record.arguments["op"], record.arguments.get("axis", -1)
    sharded = [path for path in plan.cuts if path.startswith(f"{record.path}." if record.path else "")]
    if sharded and op in _SUMS:
        what = (
            f"sync({mode!r}, {op!r}) on a module with sharded ones in it, {some_of(sharded)}: they sum what they "
        )
        return (
            what + "send, and this would sum it again",
            "leave the call out: what must be sent follows from the shards",
        )
    if not plan.layout.sp or op not in ALONG_AN_AXIS or axis == -1:
        return None
    what = f"sync({mode!r}, {op!r}, axis={axis}) under sequence parallelism, which cuts "
    return what + "sequences before the first layer and gathers them after the last", "leave the call out"


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
