"""Writes and reads spans of a run in Chrome's trace format, which Perfetto and chrome://tracing show.

Each rank is a process of the trace, each span a complete event (``"ph": "X"``) whose category is the span's kind;
iteration, micro-batch and chunk stand in its ``args``. Times are in microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

from megasched.errors import ConfigError
from megasched.reading.files import Expected
from megasched.reading.json_file import read_json
from megasched.trace.timeline import Kind, Span

FORMAT = 1
TRACE = Expected(f"a trace of format {FORMAT}, which --megasched-trace of a run writes", most=1 << 30)
KINDS: tuple[Kind, ...] = get_args(Kind)
MICROSECONDS = 1e6
MOST = 2**53  # of any number in a file: past it floats have no whole numbers
_COLOURS = {
    "forward": "rail_response",
    "backward": "rail_animation",
    "communication": "grey",
    "optimizer": "rail_load",
}


@dataclass(frozen=True)
class RankCoordinates:
    """Tells where a rank stands in the layout: its number within each kind of group."""

    pp: int
    tp: int
    dp: int
    cp: int = 0

    def __str__(self) -> str:
        text = f"pp {self.pp}, tp {self.tp}, dp {self.dp}"
        return f"{text}, cp {self.cp}" if self.cp else text


@dataclass(frozen=True)
class Trace:
    """Holds a recorded run.

    Attributes:
        places: global rank -> its coordinates.
        iterations: number as in Megatron's log -> spans of all ranks, ordered by rank and start; their times count
            from the first span of that iteration.
        clock_error: by how much the ranks' clocks may differ, in seconds.
        complete: whether it has all ranks of a run: none is missing, and it is no prediction.
    """

    places: dict[int, RankCoordinates]
    iterations: dict[int, list[Span]]
    clock_error: float
    complete: bool


def trace_pieces(
    ranks: Iterable[tuple[int, RankCoordinates, Mapping[int, Sequence[Span]]]], about: Mapping[str, Any]
) -> Iterator[str]:
    """Yields the text of a trace file, rank by rank.

    Args:
        ranks: global rank, its coordinates, and its spans by iteration, all on one clock.
        about: plain data on the whole run, read after the last rank.
    """
    yield '{"displayTimeUnit": "ms", "traceEvents": [\n'
    places: dict[str, Any] = {}
    comma = ""
    for rank, place, iterations in ranks:
        places[str(rank)] = asdict(place)
        for event in [*_of_process(rank, place), *_of_spans(iterations)]:
            yield f"{comma}{json.dumps(event)}"
            comma = ",\n"
    yield f'\n], "otherData": {json.dumps({"format": FORMAT, "ranks": places, **about})}}}\n'


def _of_process(rank: int, place: RankCoordinates) -> Iterator[dict[str, Any]]:
    for name, values in (
        ("process_name", {"name": f"rank {rank}: {place}"}),
        ("process_sort_index", {"sort_index": rank}),
        ("thread_name", {"name": "step"}),
    ):
        yield {"ph": "M", "name": name, "pid": rank, "tid": 0, "args": values}


def _of_spans(iterations: Mapping[int, Sequence[Span]]) -> Iterator[dict[str, Any]]:
    for iteration, spans in iterations.items():
        for span in sorted(spans, key=lambda span: span.start):
            start, end = (round(MICROSECONDS * time, 3) for time in (span.start, span.end))
            yield {
                "ph": "X",
                "name": span.name or f"{span.kind} {span.microbatch}",
                "cat": span.kind,
                "cname": _COLOURS[span.kind],
                "pid": span.rank,
                "tid": 0,
                "ts": start,
                "dur": round(end - start, 3),
                "args": {"iteration": iteration, "microbatch": span.microbatch, "chunk": span.chunk},
            }


def read_trace(path: Path) -> Trace:
    """Reads what ``--megasched-trace`` wrote; events of other categories are passed over.

    Raises:
        ConfigError: it can't be read, or is no such file.
    """
    found = read_json(path, TRACE, {"otherData": {"format": int, "ranks": {str: {}}}})
    about = found["otherData"]
    if about["format"] != FORMAT:
        raise TRACE.refusal(path, f"it is of format {about['format']}")
    try:
        return _trace(found, about)
    except _Wrong as wrong:
        raise ConfigError(f"{path}: {wrong}") from wrong


class _Wrong(Exception):
    """Says what is wrong with the contents of a trace."""


def _trace(found: dict[str, Any], about: dict[str, Any]) -> Trace:
    places = {}
    for rank, values in about["ranks"].items():
        where = f"otherData: ranks: {rank!r:.40}"
        if not (rank.isascii() and rank.isdecimal() and len(rank) < 10) or not isinstance(values, dict):
            raise _Wrong(f"{where}: a rank's number and its place are due")
        places[int(rank)] = RankCoordinates(
            **{name: _count(values, name, where) for name in ("pp", "tp", "dp", "cp")}
        )
    events = found.get("traceEvents")
    if not isinstance(events, list):
        raise _Wrong("traceEvents is no list")
    iterations: dict[int, list[Span]] = {}
    for number, event in enumerate(events):
        if isinstance(event, dict) and event.get("ph") == "X" and event.get("cat") in KINDS:
            iteration, span = _span(event, f"event {number}", places)
            iterations.setdefault(iteration, []).append(span)
    if not iterations:
        raise _Wrong("it has no spans")
    error = _number(about, "clock_error", "otherData")
    complete = not about.get("missing_ranks") and "predicted" not in about
    return Trace(places, {i: _from_zero(iterations[i]) for i in sorted(iterations)}, error, complete)


def _span(event: dict[str, Any], where: str, places: Mapping[int, RankCoordinates]) -> tuple[int, Span]:
    values = event.get("args")
    if not isinstance(values, dict):
        raise _Wrong(f"{where}: `args` with iteration, microbatch and chunk are due")
    rank = _count(event, "pid", where)
    if rank not in places:
        raise _Wrong(f"{where}: `pid` {rank} is no rank of this trace")
    start, name = _number(event, "ts", where), event.get("name", "")
    work = event["cat"] in ("forward", "backward")
    microbatch, chunk = (
        _count(values, key, where) if work or values.get(key) is not None else None
        for key in ("microbatch", "chunk")
    )
    end = start + _number(event, "dur", where)
    if not isinstance(name, str):
        raise _Wrong(f"{where}: `name` is no text")
    span = Span(rank, event["cat"], microbatch, chunk, start / MICROSECONDS, end / MICROSECONDS, name)
    return _count(values, "iteration", where), span


def _count(values: Mapping[str, Any], key: str, where: str) -> int:
    value = values.get(key)
    if type(value) is not int or not 0 <= value < MOST:
        raise _Wrong(f"{where}: `{key}` is {value!r:.40}; a whole number of at least 0 is due")
    return value


def _number(values: Mapping[str, Any], key: str, where: str) -> float:
    value = values.get(key)
    if type(value) not in (int, float) or not 0 <= value < MOST:
        raise _Wrong(f"{where}: `{key}` is {value!r:.40}; a number of at least 0 is due")
    return float(value)


def _from_zero(spans: list[Span]) -> list[Span]:
    zero = min(span.start for span in spans)
    moved = [Span(s.rank, s.kind, s.microbatch, s.chunk, s.start - zero, s.end - zero, s.name) for s in spans]
    return sorted(moved, key=lambda span: (span.rank, span.start))
