"""Collects the contents of the page of ``megasched show --html``: a report, and its step in time and memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from megasched.cli.page.recorded import RecordedStep
from megasched.cli.show.report import ShowReport
from megasched.cli.show.volumes import Volume, describe_volumes
from megasched.planner.pipeline import Chunk, simulate
from megasched.trace.chrome_trace import KINDS
from megasched.trace.timeline import Span

BACKWARD_FORWARDS = 2.0  # a backward costs as much as two forwards
TICKS = 10**8  # of the longest step; the page shows no more than some 1,000 pixels of them


@dataclass(frozen=True)
class Page:
    """Holds all contents of the page.

    Attributes:
        report: the report that `megasched show` prints.
        volumes: amounts that ranks send to each other.
        predicted: spans of a predicted step, by pipeline rank.
        measured: spans of a recorded step, by pipeline rank; empty without a trace.
        unit: unit of the times: ``s``, or empty where they are relative.
        notes: remarks on the timeline, in sentences.
    """

    report: ShowReport
    volumes: list[Volume]
    predicted: list[Span]
    measured: list[Span]
    unit: str
    notes: list[str]


def build_page(report: ShowReport, recorded: RecordedStep | None = None) -> Page:
    """Collects what a report with its step, and a recorded run, tell of that step."""
    step, notes = report.step, []
    measured: list[Span] = []
    if recorded is not None:
        measured = recorded.spans
        notes.append(recorded.note)
    time = step.prediction.time if step.prediction else None
    if time is not None:
        spans, unit = simulate(time.chunks, step.microbatches), "s"
    else:
        spans, unit = predict_from_flops(report), ""
        made = "The predicted step is made from the stages' shares of the FLOPs, a backward as two forwards, "
        made += "without communication: "
        if measured:
            spans, unit = _as_much_work(spans, measured), "s"
            notes.append(f"{made}scaled so that all its work takes as long as the measured work.")
        else:
            notes.append(f"{made}times are relative, 1 is the forward of an average chunk.")
    return Page(report, describe_volumes(report), spans, measured, unit, notes)


def idle_share(page: Page) -> float:
    """Returns the share of the predicted step in which the busiest pipeline rank does nothing."""
    busy = [0.0] * page.report.layout.pp
    for span in page.predicted:
        busy[span.rank] += span.seconds
    return 1 - max(busy) / max(span.end for span in page.predicted)


def predict_from_flops(report: ShowReport) -> list[Span]:
    """Returns a step of the report's layout, made from its stages' FLOPs; 1 is the forward of an average chunk."""
    layout = report.layout
    shares = {(stage.pp_rank, stage.vp_stage): stage.flops_share * len(report.stages) for stage in report.stages}
    chunks = [
        [Chunk(shares[rank, chunk], BACKWARD_FORWARDS * shares[rank, chunk]) for chunk in range(layout.vpp)]
        for rank in range(layout.pp)
    ]
    return simulate(chunks, report.step.microbatches)


def _as_much_work(predicted: Sequence[Span], measured: Sequence[Span]) -> list[Span]:
    """Returns the predicted spans on a scale on which they add up to the measured forwards and backwards."""
    total = sum(span.seconds for span in measured if span.kind in ("forward", "backward"))
    scale = total / sum(span.seconds for span in predicted)
    return [replace(span, start=scale * span.start, end=scale * span.end) for span in predicted]


def timeline_data(predicted: Sequence[Span], measured: Sequence[Span], unit: str) -> dict[str, Any]:
    """Returns the spans as the page's script reads them: whole numbers, small enough for 100,000s of spans.

    Returns:
        ``kinds``, ``unit``, ``end`` and ``tick`` in units, ``names`` of spans, and ``lanes``: pipeline rank,
        source and 6 numbers for each span, one after the other: kind, micro-batch, chunk (-1 for none), ticks
        since the end of the span before, duration in ticks, and index of the name.
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
