"""FLOPs of attention: what a run, a cut and a plan count alike."""

from __future__ import annotations


def attended(queries: int, keys: int, causal: bool, window: int | None) -> float:
    """Pairs of a query and a key that it attends to; the last query stands at the last key.

    Args:
        window: keys that a query attends to, its own included; None for all.
    """
    if not causal:
        return float(queries * keys)
    most = keys if window is None else min(window, keys)
    first = keys - queries + 1  # keys up to the first query's own
    growing = max(0, min(queries, most - first))  # queries that see fewer keys than they may
    return growing * first + growing * (growing - 1) / 2 + (queries - growing) * float(most)


def attention_flops(pairs: float, width: int, value_width: int, backward: bool = False) -> float:
    """Two products of each query with each key that it attends to forward, five backward.

    Args:
        pairs: of a query and such a key, in all heads.
        width: of a query and a key in one head.
    """
    return 2.0 * pairs * (3 * width + 2 * value_width if backward else width + value_width)
