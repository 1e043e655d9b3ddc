"""Finds columns with fewer KV heads than TP ranks, so that several ranks can have the same head."""

from __future__ import annotations

from collections.abc import Mapping

from megasched.analysis.tp.facts import TpFacts


def is_uneven(column: str, tp_facts: TpFacts, tp: int) -> bool:
    """Returns whether TP does not divide the sizes of tensors that stem from a column."""
    return any(size % tp for size in tp_facts.cut_sizes.get(column, ()))


def few_heads(
    features: Mapping[str, int], tp_facts: TpFacts, components: Mapping[str, tuple[int, ...]], tp: int
) -> dict[str, tuple[int, ...]]:
    """Returns columns that can't be cut -> heads of their components (``ShardDim``) with which they may be.

    Smaller ones are taken for key and value. The next labelled run shows whether they are: heads that ranks share
    fit nothing but attention, and a head that all ranks have is the same for all.

    Args:
        features: columns that feed one row -> number of output features of each.
        tp_facts: facts of a run that had them cut.
        components: column -> sizes of the projections packed into its output.
    """
    found = {}
    for column, size in features.items():
        parts = components.get(column, ())
        packed = len(parts) == 3 and parts[0] > parts[1] == parts[2]
        heads = 0
        if is_uneven(column, tp_facts, tp):
            heads = min(tp_facts.cut_sizes[column])
        elif column in tp_facts.gather and (packed or size < max(features.values())):
            heads = 1  # one head is no dimension of its own, so it was taken to be cut inside
        if 0 < heads < tp and tp % heads == 0 and (packed or heads == 1 or not parts):
            found[column] = (0, heads, heads) if packed else (heads,)
    return found
