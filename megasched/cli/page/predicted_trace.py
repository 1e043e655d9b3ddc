"""Writes a predicted step as ``--megasched-trace`` writes recorded ones, for Perfetto and for ``--trace``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from megasched.cli.show.report import ShowReport
from megasched.errors import ConfigError
from megasched.files import write_whole
from megasched.planner.pipeline import simulate
from megasched.trace.chrome_trace import RankCoordinates, trace_pieces


def write_trace(report: ShowReport, path: Path) -> None:
    """Writes the predicted step of the ranks with tp 0, dp 0 and cp 0, as iteration 1.

    Raises:
        ConfigError: the step was not predicted in seconds, or the file can't be written.
    """
    step, layout = report.step, report.layout
    time = step.prediction.time if step.prediction else None
    if time is None:
        raise ConfigError(f"--predicted-trace {path}: the step is not predicted: {step.why_not}")
    between = layout.world_size // layout.pp  # ranks from one stage to the next
    spans = [replace(span, rank=span.rank * between) for span in simulate(time.chunks, step.microbatches)]
    ranks = [
        (rank, RankCoordinates(number, 0, 0), {1: [span for span in spans if span.rank == rank]})
        for number, rank in enumerate(range(0, layout.world_size, between))
    ]
    about = {"clock_error": 0.0, "missing_ranks": [], "predicted": step.hardware and step.hardware.name}
    try:
        write_whole(path, trace_pieces(ranks, about))
    except OSError as error:
        raise ConfigError(f"--predicted-trace {path}: it can't be written: {error.strerror}") from error
