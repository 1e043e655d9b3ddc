"""Defines the FLOPs of attention, as runs, cuts and plans all count them."""

from __future__ import annotations


def attended(queries: int, keys: int, causal: bool, window: int | None) -> float:
    """Returns the number of query-key pairs in which the query attends to the key.

    The last query stands at the last key.

    Args:
        window: number of keys that a query attends to, its own included; None for all.
    """
    if not causal:
        return float(queries * keys)
    most = keys if window is None else min(window, keys)
    first = keys - queries + 1  # keys up to the first query's own
    growing = max(0, min(queries, most - first))  # queries that see fewer keys than they may
    return growing * first + growing * (growing - 1) / 2 + (queries - growing) * float(most)


def attention_flops(pairs: float, width: int, value_width: int, backward: bool = False) -> float:
    """Returns the FLOPs of attention: two products per query-key pair in the forward, five in the backward.

    Args:
        pairs: number of such pairs in which the query attends to the key, over all heads.
        width: width of a query and of a key in one head.
    """
    return 2.0 * pairs * (3 * width + 2 * value_width if backward else width + value_width)
