"""Collects the contents of the page of ``megasched show --html``: a report, and its step in time and memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megasched.cli.page.volumes import Volume, describe_volumes
from megasched.cli.show.report import ShowReport
from megasched.errors import ConfigError
from megasched.language.parallel_dims import ParallelDims
from megasched.planner.pipeline import Chunk, simulate
from megasched.trace.chrome_trace import KINDS, Trace, read_trace
from megasched.trace.timeline import Span

# Of a pipeline rank in one step, where nobody says how many: enough to see the steady state.
MICROBATCHES_A_RANK = 4
BACKWARD_FORWARDS = 2.0  # a backward costs as much as two forwards
TICKS = 10**8  # of the longest step; the page shows no more than some 1,000 pixels of them


@dataclass(frozen=True)
class Page:
    """Holds all contents of the page.

    Attributes:
        report: the report that `megasched show` prints.
        microbatches: number of micro-batches in a step.
        volumes: amounts that ranks send to each other.
        memory: for each pipeline rank, bytes by part; empty where they were not predicted.
        predicted: spans of a predicted step, by pipeline rank.
        measured: spans of a recorded step, by pipeline rank; empty without a trace.
        unit: unit of the times: ``s``, or empty where they are relative.
        notes: remarks on the timeline, in sentences.
    """

    report: ShowReport
    microbatches: int
    volumes: list[Volume]
    memory: list[Mapping[str, int]]
    predicted: list[Span]
    measured: list[Span]
    unit: str
    notes: list[str]


def build_page(
    report: ShowReport,
    *,
    global_batch_size: int | None = None,
    memory: Sequence[Mapping[str, int]] = (),
    predicted: Sequence[Span] = (),
    trace: Path | None = None,
) -> Page:
    """Collects what a report, the planner and a trace tell of a step.

    Args:
        global_batch_size: sequences in a step; by default those of the trace, or a few for each pipeline rank.
        memory: for each pipeline rank, bytes by part.
        predicted: spans of a step in seconds, by pipeline rank; by default they are computed from the FLOPs of the
            stages, and are relative unless a trace gives their scale.
        trace: file of ``--megasched-trace``, of a run at this layout.

    Raises:
        ConfigError: the batch does not fit the layout or trace, or the trace is unreadable or of another layout.
    """
    microbatches = None if global_batch_size is None else _microbatches(report.layout, global_batch_size)
    notes: list[str] = []
    measured: list[Span] = []
    if trace is not None:
        measured, recorded, note = _measured(read_trace(trace), trace, report.layout)
        if microbatches not in (None, recorded):
            raise ConfigError(
                f"--trace {trace}: its steps have {recorded} micro-batches, those of --global-batch-size "
                f"{global_batch_size} have {microbatches}; leave that out to take the trace's"
            )
        microbatches = recorded
        notes.append(note)
    microbatches = microbatches or MICROBATCHES_A_RANK * report.layout.pp
    spans, unit = list(predicted), "s"
    if not spans:
        spans, unit = predict_from_flops(report, microbatches), ""
        made = "The predicted step is made from the stages' shares of the FLOPs, a backward as two forwards, "
        made += "without communication: "
        if measured:
            spans, unit = _as_much_work(spans, measured), "s"
            notes.append(f"{made}scaled so that all its work takes as long as the measured work.")
        else:
            notes.append(f"{made}times are relative, 1 is the forward of an average chunk.")
    return Page(report, microbatches, describe_volumes(report), list(memory), spans, measured, unit, notes)


def predict_from_flops(report: ShowReport, microbatches: int) -> list[Span]:
    """Returns a step of the report's layout, made from its stages' FLOPs; 1 is the forward of an average chunk."""
    layout = report.layout
    shares = {(stage.pp_rank, stage.vp_stage): stage.flops_share * len(report.stages) for stage in report.stages}
    chunks = [
        [Chunk(shares[rank, chunk], BACKWARD_FORWARDS * shares[rank, chunk]) for chunk in range(layout.vpp)]
        for rank in range(layout.pp)
    ]
    return simulate(chunks, microbatches)


def _microbatches(layout: ParallelDims, global_batch_size: int) -> int:
    at_once = layout.micro_batch_size * layout.data_parallel_size
    count, rest = divmod(global_batch_size, at_once)
    if rest or count < 1:
        raise ConfigError(
            f"--global-batch-size {global_batch_size} is no multiple of {at_once}: micro-batches of "
            f"{layout.micro_batch_size} on {layout.data_parallel_size} DP ranks"
        )
    if layout.vpp > 1 and count % layout.pp:
        raise ConfigError(
            f"--global-batch-size {global_batch_size} makes {count} micro-batches: interleaving (VPP) needs a "
            f"multiple of PP {layout.pp}"
        )
    return count


def _measured(trace: Trace, path: Path, layout: ParallelDims) -> tuple[list[Span], int, str]:
    """Returns the spans of the last recorded step by pipeline rank, its number of micro-batches, and a note."""
    pipeline = {rank: p.pp for rank, p in trace.places.items() if (p.tp, p.dp, p.cp) == (0, 0, 0)}
    iteration = max(trace.iterations)
    spans = [replace(s, rank=pipeline[s.rank]) for s in trace.iterations[iteration] if s.rank in pipeline]
    work = [span for span in spans if span.microbatch is not None and span.chunk is not None]
    found = (len({span.rank for span in work}), 1 + max((span.chunk or 0 for span in work), default=-1))
    if found != (layout.pp, layout.vpp):
        raise ConfigError(
            f"--trace {path}: its ranks with tp 0 and dp 0 are of PP {found[0]} and VPP {found[1]}, and this "
            f"layout has PP {layout.pp} and VPP {layout.vpp}"
        )
    microbatches = 1 + max(span.microbatch or 0 for span in work)
    note = f"Measured is iteration {iteration} of {path.name}, on the ranks with tp 0 and dp 0"
    note += f"; their clocks may differ by {1e3 * trace.clock_error:.3f} ms." if layout.pp > 1 else "."
    return sorted(spans, key=lambda span: (span.rank, span.start)), microbatches, note


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
