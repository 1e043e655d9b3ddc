"""Medians and ratios of interleaved timings."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and quartiles; one value is all three."""
    low, median, high = statistics.quantiles(values, n=4) if len(values) > 1 else [values[0]] * 3
    return {"median": median, "low_quartile": low, "high_quartile": high}


def ratio(seconds: Sequence[float], base: Sequence[float]) -> dict[str, float]:
    """How often faster than the base: spread of base / seconds, round by round.

    Timings of one round lie close together in time, so that what else the machine does hits both alike.
    """
    return spread([other / own for own, other in zip(seconds, base, strict=True)])


def ratios_to(seconds: Mapping[str, Sequence[float]], base: str) -> dict[str, dict[str, float]]:
    """Name -> speed relative to ``base``; empty where the base was left out."""
    if base not in seconds:
        return {}
    return {name: ratio(found, seconds[base]) for name, found in seconds.items() if name != base}


def summary(seconds: Mapping[str, Sequence[float]], tokens: int, bases: Sequence[str]) -> dict[str, Any]:
    """Figures of one comparison.

    Args:
        seconds: name -> seconds of a step, one value a round.
        tokens: in one step.
        bases: names that the speeds are divided by.
    """
    return {
        "seconds": {name: spread(found) for name, found in seconds.items()},
        "tokens_per_second": {name: tokens / spread(found)["median"] for name, found in seconds.items()},
        "speed_relative_to": {base: ratios_to(seconds, base) for base in bases},
        "rounds": {name: list(found) for name, found in seconds.items()},
    }


def together(summaries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Several comparisons as one; of a name in more than one, the figures of the first, but for the ratios."""
    found: dict[str, Any] = {}
    for one in summaries:
        for key, values in one.items():
            kept = found.setdefault(key, {})
            for name, figures in values.items():
                if key == "speed_relative_to":
                    kept.setdefault(name, {}).update(figures)
                else:
                    kept.setdefault(name, figures)
    return found
