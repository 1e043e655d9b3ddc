"""Reads the step of a recorded run that the page lays over the predicted one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from operator import gt
from pathlib import Path

from megasched.errors import ConfigError
from megasched.language.parallel_dims import ParallelDims
from megasched.trace.chrome_trace import read_trace
from megasched.trace.timeline import Span


@dataclass(frozen=True)
class RecordedStep:
    """Holds the last recorded step of a run.

    Attributes:
        path: file of ``--megasched-trace``.
        spans: spans by pipeline rank.
        microbatches: number of micro-batches in the step.
        note: sentence on which step it is.
    """

    path: Path
    spans: list[Span]
    microbatches: int
    note: str


def recorded_step(path: Path, layout: ParallelDims) -> RecordedStep:
    """Reads the last recorded step of a run.

    Args:
        path: file of ``--megasched-trace``.
        layout: the run's.

    Raises:
        ConfigError: the trace is unreadable or of another layout.
    """
    trace = read_trace(path)
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
    sizes = tuple(1 + max(getattr(place, name) for place in trace.places.values()) for name in ("tp", "cp", "dp"))
    due = layout.tp, layout.cp, layout.data_parallel_size
    if any(map(gt, sizes, due)) or (trace.complete and sizes != due):
        of_trace, of_layout = ("TP {}, CP {} and DP {}".format(*each) for each in (sizes, due))
        raise ConfigError(f"--trace {path}: its ranks are of {of_trace}, and this layout has {of_layout}")
    microbatches = 1 + max(span.microbatch or 0 for span in work)
    note = f"Measured is iteration {iteration} of {path.name}, on the ranks with tp 0 and dp 0"
    note += f"; their clocks may differ by {1e3 * trace.clock_error:.3f} ms." if layout.pp > 1 else "."
    return RecordedStep(path, sorted(spans, key=lambda span: (span.rank, span.start)), microbatches, note)
