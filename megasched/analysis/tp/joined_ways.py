"""Joins the facts of several labelled runs, each another way through a definition's code (``trials/ways.py``)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megasched.analysis.stages.layer_stack import LayerStack
from megasched.analysis.tp.facts import TpFacts
from megasched.analysis.trials.ways import Way
from megasched.errors import Problem

# What is true of a parameter, a column or an operator in any way is true of it.
_OF_ANY = frozenset(
    [
        "gather",
        "partial",
        "sequence",
        "complete",
        "rows_inside",
        "rows_of_tokens",
        "overwritten",
        "by_heads",
        "called",
    ]
)
# Of modules: what is done there is done in every way that runs them.
_BY_MODULE = frozenset(
    (
        *("scatter", "whole_inputs", "needed_regions", "inside", "forked", "logits"),
        "input_components",
        *("regions", "whole_slots", "exits", "recorded", "split_slots", "attention", "experts"),
    )
)


def join(base: TpFacts, other: TpFacts, way: Way, structure: LayerStack | None, *, split: bool) -> None:
    """Adds the facts of another way to those of a trial.

    Args:
        split: whether the hidden state is split along the sequence inside of the layers.
    """
    for path in dict.fromkeys(_differing(base, other)):
        what = f"what is done to its tensors goes by {way}, and a plan has one way for all"
        _problem(base, Problem(what, path, remedy="leave the linears around it whole, or run it without TP"))
    for layer in _ends(structure, base, other) if split else ():
        what = (
            f"whether it runs goes by {way}, and sequence parallelism joins the hidden state after the last layer"
        )
        _problem(base, Problem(what, layer, remedy="run it without sequence parallelism"))
    for name in (*_OF_ANY, *_BY_MODULE, "parts", "read_elsewhere", "stage_inputs"):
        getattr(base, name).update(getattr(other, name))
    for name in ("cut_sizes", "without_rule", "readers"):
        for key, found in getattr(other, name).items():
            getattr(base, name)[key] |= found
    told = set(base.shared)
    base.shared += [columns for columns in other.shared if columns not in told]
    for problem in other.problems:
        _problem(base, problem)
    base.other_calls.append(other.calls)


def _differing(base: TpFacts, other: TpFacts) -> Iterator[str]:
    """Yields the paths of modules that both ways run, and that they treat differently."""
    both = base.called & other.called
    for name in sorted(_BY_MODULE):
        one, two = getattr(base, name), getattr(other, name)
        for path in sorted(both & (set(one) | set(two))):
            if (path in one) != (path in two) or (isinstance(one, Mapping) and one[path] != two[path]):
                yield path
    for place in base.stage_inputs.keys() & other.stage_inputs.keys():
        if base.stage_inputs[place] != other.stage_inputs[place]:
            yield place.path
    for columns in set(base.shared) ^ set(other.shared):
        if both.issuperset(columns):
            yield columns[0]
    for argument in base.parts.keys() | other.parts.keys():
        path: Any = argument.path
        if path in both and base.parts.get(argument) != other.parts.get(argument):
            yield path


def _ends(structure: LayerStack | None, base: TpFacts, other: TpFacts) -> list[str]:
    """Returns the first and the last layer, as far as only one of two ways runs them."""
    if structure is None:
        return []
    ends = (structure.layer_path(structure.first), structure.layer_path(structure.last))
    return [layer for layer in ends if (layer in base.called) != (layer in other.called)]


def _problem(tp_facts: TpFacts, problem: Problem) -> None:
    if all(known.module != problem.module for known in tp_facts.problems):
        tp_facts.problems.append(problem)
