"""Spans as the page's script reads them: whole numbers, small enough for 100,000s of spans."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megasched.trace.chrome_trace import KINDS
from megasched.trace.timeline import Span

TICKS = 10**8  # of the longest step; the page shows no more than some 1,000 pixels of them


def timeline_data(predicted: Sequence[Span], measured: Sequence[Span], unit: str) -> dict[str, Any]:
    """All lanes.

    Returns:
        ``kinds``, ``unit``, ``end`` and ``tick`` in units, ``names`` of spans, and ``lanes``: pipeline rank,
        source and 6 numbers for each span, one after the other: kind, micro-batch, chunk (-1 for none), ticks
        since the end of the one before, ticks that it takes, and name.
    """
    end = max((span.end for span in (*predicted, *measured)), default=0.0)
    tick = end / TICKS or 1.0
    names: dict[str, int] = {}
    lanes = []
    for rank in sorted({span.rank for span in (*predicted, *measured)}):
        for source, spans in (("predicted", predicted), ("measured", measured)):
            own = sorted((span for span in spans if span.rank == rank), key=lambda span: span.start)
            if own:
                lanes.append({"rank": rank, "source": source, "spans": _numbers(own, tick, names)})
    return {"kinds": list(KINDS), "unit": unit, "end": end, "tick": tick, "names": list(names), "lanes": lanes}


def _numbers(spans: Sequence[Span], tick: float, names: dict[str, int]) -> list[int]:
    found: list[int] = []
    before = 0
    for span in spans:
        start, end = (round(time / tick) for time in (span.start, span.end))
        name = names.setdefault(span.name, len(names))
        of = (-1 if number is None else number for number in (span.microbatch, span.chunk))
        found += [KINDS.index(span.kind), *of, start - before, end - start, name]
        before = end
    return found
