"""Gathers one file a rank into one, without a collective, so that a rank that fails holds up nobody for long."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megasched.files import write_whole
from megasched.reading.files import Expected
from megasched.reading.json_file import read_json
from megasched.trace.chrome_trace import RankCoordinates, trace_pieces
from megasched.trace.clocks import offset
from megasched.trace.timeline import Span

# How long rank 0 waits for the parts of the others; the next step waits for rank 0 as long.
WAIT_SECONDS = 60.0
POLL_SECONDS = 0.05
PART = Expected("what one rank has recorded of this run", most=1 << 30)
_FORM = {"rank": int, "place": {str: int}, "host": str, "barriers": [float], "iterations": {str: [{}]}}


@dataclass(frozen=True)
class RankSpans:
    """Holds what one rank recorded.

    Attributes:
        host: identifies the machine (`clocks.host`): ranks of one machine have one clock.
        barriers: when the rank left each barrier, on its clock, in seconds.
        iterations: number -> spans, on its clock.
    """

    rank: int
    place: RankCoordinates
    host: str
    barriers: list[float]
    iterations: dict[int, list[Span]]

    def to_json(self) -> str:
        return json.dumps({**asdict(self), "place": asdict(self.place)})

    @classmethod
    def read(cls, path: Path) -> RankSpans:
        """Reads the file of one rank.

        Raises:
            ConfigError: there is no such file, or something else has changed it.
        """
        found = read_json(path, PART, _FORM)
        try:
            iterations = {int(i): [Span(**span) for span in spans] for i, spans in found["iterations"].items()}
            place = RankCoordinates(**found["place"])
        except (TypeError, ValueError) as error:
            raise PART.refusal(path, str(error)) from error
        return cls(found["rank"], place, found["host"], found["barriers"], iterations)


def part_path(file: Path, rank: int) -> Path:
    return file.with_name(f"{file.name}.rank{rank:05d}")


def write_part(file: Path, part: RankSpans) -> None:
    """Writes the file of one rank.

    Raises:
        OSError: it can't be written.
    """
    write_whole(part_path(file, part.rank), [part.to_json()])


def gather(file: Path, world_size: int, *, seconds: float = WAIT_SECONDS) -> list[int]:
    """Puts the parts of all ranks into the one file and removes them; rank 0 calls it.

    Args:
        seconds: time to wait for parts that are not there yet.

    Returns:
        Ranks whose part has not come; the file is without them, the parts of the others are removed.

    Raises:
        OSError: the file can't be written; the parts stay.
    """
    missing = _await_parts(file, world_size, time.monotonic() + seconds)
    ranks = [rank for rank in range(world_size) if rank not in missing]
    about: dict[str, Any] = {"clock_error": 0.0, "missing_ranks": missing}
    write_whole(file, trace_pieces(_on_one_clock(file, ranks, about), about))
    for rank in ranks:
        part_path(file, rank).unlink(missing_ok=True)
    return missing


def _await_parts(file: Path, world_size: int, deadline: float) -> list[int]:
    missing = list(range(world_size))
    while True:
        missing = [rank for rank in missing if not part_path(file, rank).exists()]
        if not missing or time.monotonic() > deadline:
            return missing
        time.sleep(POLL_SECONDS)


def _on_one_clock(
    file: Path, ranks: Sequence[int], about: dict[str, Any]
) -> Iterator[tuple[int, RankCoordinates, dict[int, list[Span]]]]:
    """Yields the parts one by one; times count from the last barrier on the first part's clock."""
    first: RankSpans | None = None
    for rank in ranks:
        part = RankSpans.read(part_path(file, rank))
        first = first or part
        same = part.host == first.host
        ahead, error = (0.0, 0.0) if same else offset(part.barriers, first.barriers)
        about["clock_error"] = max(about["clock_error"], error)
        zero = first.barriers[-1] + ahead
        yield rank, part.place, {i: [_moved(span, zero) for span in spans] for i, spans in part.iterations.items()}


def _moved(span: Span, zero: float) -> Span:
    # A clock that is off by more than the first span is late would give a time before the beginning.
    start = max(0.0, span.start - zero)
    return Span(span.rank, span.kind, span.microbatch, span.chunk, start, max(start, span.end - zero), span.name)
