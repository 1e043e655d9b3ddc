"""Trace files: what is written is read again, and what is none is refused with a reason."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megasched.errors import ConfigError
from megasched.trace.chrome_trace import KINDS, RankCoordinates, read_trace, trace_pieces
from megasched.trace.timeline import Span

ABOUT = {"clock_error": 2e-5, "missing_ranks": []}
times = st.integers(0, 10**9).map(lambda microseconds: microseconds / 1e6)
counts = st.integers(0, 1000)
names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)


@st.composite
def spans(draw, rank):
    start, seconds = draw(times), draw(times)
    kind = draw(st.sampled_from(KINDS))
    work = kind in ("forward", "backward")
    microbatch, chunk = (draw(counts) if work else None for _ in range(2))
    return Span(rank, kind, microbatch, chunk, start, start + seconds, draw(names))


@settings(max_examples=30)
@given(st.data())
def test_what_is_written_is_read(tmp_path_factory, data):
    ranks = [
        (rank, RankCoordinates(rank, 0, 0), {7: data.draw(st.lists(spans(rank), min_size=1, max_size=5))})
        for rank in (0, 1)
    ]
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    path.write_text("".join(trace_pieces(ranks, ABOUT)), encoding="utf-8")
    found = read_trace(path)
    written = [span for _, _, iterations in ranks for span in iterations[7]]
    zero = min(span.start for span in written)
    assert found.places == {0: RankCoordinates(0, 0, 0), 1: RankCoordinates(1, 0, 0)}
    assert found.clock_error == 2e-5
    assert min(span.start for span in found.iterations[7]) == 0

    def told(span, zero=0.0):
        times = (pytest.approx(time - zero, abs=2e-9, rel=1e-9) for time in (span.start, span.end))
        return (span.rank, span.kind, span.microbatch, span.chunk, *times, span.name)

    read, expected = list(found.iterations[7]), sorted(written, key=lambda span: (span.rank, span.start))
    assert sorted((s.rank, s.start) for s in read) == [(s.rank, s.start) for s in read]
    for span in expected:
        twin = next(other for other in read if told(other) == told(span, zero))
        read.remove(twin)
    assert not read


def test_perfetto_finds_what_it_needs():
    """A complete event has ts and dur in microseconds; processes and threads have names."""
    step = [Span(3, "forward", 0, 0, 0.5, 0.75), Span(3, "optimizer", None, None, 1.0, 1.25, "Adam")]
    found = json.loads("".join(trace_pieces([(3, RankCoordinates(1, 0, 1), {7: step})], ABOUT)))
    named = {event["name"]: event for event in found["traceEvents"] if event["ph"] == "M"}
    assert named["process_name"]["args"] == {"name": "rank 3: pp 1, tp 0, dp 1"}
    assert named["thread_name"]["args"] == {"name": "step"}
    complete = [event for event in found["traceEvents"] if event["ph"] == "X"]
    assert [(event["name"], event["ts"], event["dur"]) for event in complete] == [
        ("forward 0", 5e5, 2.5e5),
        ("Adam", 1e6, 2.5e5),
    ]
    assert {(event["pid"], event["tid"]) for event in found["traceEvents"]} == {(3, 0)}


def event(**changes):
    values = {"ph": "X", "name": "x", "cat": "forward", "pid": 0, "tid": 0, "ts": 1.0, "dur": 1.0}
    return {**values, "args": {"iteration": 1, "microbatch": 0, "chunk": 0}, **changes}


def file(*events, **about):
    place = {"pp": 0, "tp": 0, "dp": 0, "cp": 0}
    other = {"format": 1, "ranks": {"0": place}, "clock_error": 0.0, **about}
    return json.dumps({"traceEvents": list(events), "otherData": other})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "line 1, column 2: it is no JSON"),
        ("[" * 100_000, "it is nested too deep; expected a trace of format 1"),
        (
            "[]",
            "is a list, an object is due; expected a trace of format 1, which --megasched-trace of a run writes",
        ),
        (file(event(), format=2), "it is of format 2; expected a trace of format 1"),
        (file(), "it has no spans"),
        (file(event(ts=-1)), "event 0: `ts` is -1; a number of at least 0 is due"),
        (file(event(), event(ts=float("nan"))), "event 1: `ts` is nan"),
        (file(event(ts=10**400)), "line 1: a whole number of 401 digits"),
        (file(event(dur="long")), "event 0: `dur` is 'long'"),
        (file(event(dur=True)), "event 0: `dur` is True"),
        (file(event(pid=1)), "event 0: `pid` 1 is no rank of this trace"),
        (file(event(name=3)), "event 0: `name` is no text"),
        (file(event(args=None)), "event 0: `args` with iteration, microbatch and chunk are due"),
        (file(event(args={"iteration": 1, "microbatch": 0, "chunk": None})), "event 0: `chunk` is None"),
        (file(event(args={"iteration": 1.5, "microbatch": 0, "chunk": 0})), "event 0: `iteration` is 1.5"),
        (file(event(), ranks={"x": {}}), "otherData: ranks: 'x': a rank's number and its place are due"),
        (file(event(), ranks={"0": {"pp": 0}}), "otherData: ranks: '0': `tp` is None"),
        (file(event(), ranks=[]), "otherData.ranks is a list, an object is due"),
        (file(event(), clock_error=None), "otherData: `clock_error` is None"),
    ],
)
def test_what_is_no_trace_is_refused_with_a_reason(tmp_path, text, message):
    path = tmp_path / "trace.json"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_trace(path)
    assert str(path) in str(caught.value)
    assert message in str(caught.value)


def test_events_of_others_are_passed_over(tmp_path):
    path = tmp_path / "trace.json"
    path.write_text(file(event(), event(cat="kernel", ts="?"), event(ph="B"), "a word", None))
    assert len(read_trace(path).iterations[1]) == 1


def test_no_file(tmp_path):
    with pytest.raises(ConfigError, match=r"trace.json: No such file"):
        read_trace(tmp_path / "trace.json")
