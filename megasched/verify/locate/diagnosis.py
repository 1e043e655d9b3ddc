"""Tells the usual cause of numbers that are wrong in a given way, in a given place."""

from __future__ import annotations

from collections.abc import Mapping

from megasched.verify.locate.matching import COPIES, DISAGREE, FACTOR, REORDERED, ROUNDED, SAME_VECTOR, SUMMED
from megasched.verify.recording import PlanFacts

# Of a ReLU, say; both sides are right as far as float32 goes.
TIPPED = "its slope jumps at 0, and rounding decides on which side of it {} of its values lie: try other data"


def likely_cause(
    direction: str,
    event: tuple[str, str],
    related: str,
    facts: PlanFacts,
    sources: Mapping[str, str],
    *,
    way: str = "",
) -> str:
    """Returns the usual cause in words; empty where there is none.

    Args:
        direction: ``forward`` or ``backward``.
        event: path of the module, and ``in``, ``out`` or ``parameter`` for its wrong input, output or parameter.
        related: how the numbers relate to the right ones, by ``matching.relation``.
        sources: module -> the one whose output it takes.
        way: how the gradient of the module's output lies over the TP ranks.
    """
    path, kind = event
    cut = facts.cuts.get(path)
    if kind == "parameter":
        return _of_parameter(path, related, sources, way)
    if related == SUMMED and direction == "forward":
        return f"the sum over TP after this {cut or 'module'}-parallel product is missing (its forward all-reduce)"
    if related == SUMMED:
        return f"the sum over TP of the gradient is missing before {_takers(path, sources)}"
    if related == DISAGREE:
        return "ranks drew different random numbers, or computed from different weights, where they must agree"
    if related.startswith(ROUNDED.partition("{")[0]):
        return "it was computed in that precision; tables of positions and the like must stay in float32"
    if related.startswith(REORDERED.partition("{")[0]):
        return "heads (or packed projections) are handed to another rank, or another group, than they belong to"
    if related == SAME_VECTOR:
        return "a bias is added on every TP rank before the sum, or not at all; it belongs after it, once"
    if related.startswith(FACTOR.partition("{")[0]):
        return _of_factor(path, kind, facts)
    if kind == "in":
        return _between(path, sources)
    return ""


def _of_parameter(path: str, related: str, sources: Mapping[str, str], way: str) -> str:
    if related == COPIES:
        return "the gradients of the copies are not added up (over Megatron's embedding group): the tie came apart"
    if related != SUMMED:
        return ""
    if way == "cut":
        return (
            "each rank saw its part of the sequence, and the parts of this gradient are not summed over TP "
            "(Megatron does it for parameters with the attribute sequence_parallel)"
        )
    takers = _takers(path, sources)
    return f"the gradient comes back in parts: the sum over TP (backward all-reduce) is missing before {takers}"


def _of_factor(path: str, kind: str, facts: PlanFacts) -> str:
    if path in facts.layers and kind == "in":
        return (
            "what stands before this layer (a multiplier, a scaling) is applied once more at a stage, or left out"
        )
    return "a multiplier is applied twice or not at all, or a sum over ranks is taken of what each has whole"


def _takers(path: str, sources: Mapping[str, str]) -> str:
    takers = [taker for taker, source in sources.items() if source == path]
    return ", ".join(takers[:4]) if takers else f"what {path} is handed to"


def _between(path: str, sources: Mapping[str, str]) -> str:
    source = sources.get(path)
    around = path.rpartition(".")[0]
    if source is not None:
        return f"it takes what {source} gives, which is right: something changes it in between"
    return (
        f"all modules before it are right: look at the code of {around or 'the model'} that computes what it takes"
    )
