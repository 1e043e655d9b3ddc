"""The arithmetic of the page's timeline, in V8: what is drawn of it, and what lies under a pointer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from py_mini_racer import MiniRacer

import megasched.cli.page
from megasched.cli.page.page import TICKS, timeline_data
from megasched.planner.pipeline import Chunk, simulate
from megasched.trace.timeline import Span

SCRIPT = Path(megasched.cli.page.__file__).parent / "template" / "timeline.js"
WIDTH = 1000


@pytest.fixture(scope="module")
def script():
    engine = MiniRacer()
    engine.eval(SCRIPT.read_text())

    def run(expression, data=None):
        if data is not None:
            engine.eval(f"var data = {json.dumps(data)}; var lanes = Timeline.decode(data);")
        return json.loads(engine.eval(f"JSON.stringify({expression})"))

    return run


@st.composite
def rows(draw):
    """Spans of one rank, one after the other, some close together, some of no length."""
    times = sorted(draw(st.lists(st.integers(0, 10**6), min_size=2, max_size=40)))
    times = times[: len(times) // 2 * 2]
    return [
        Span(0, draw(st.sampled_from(["forward", "backward"])), i, 0, start, end)
        for i, (start, end) in enumerate(zip(times[::2], times[1::2], strict=True))
    ]


@settings(max_examples=60)
@given(rows(), st.floats(0, 1))
def test_the_span_under_a_time_is_found(script, spans, place):
    data = timeline_data(spans, [], "s")
    time = place * max(span.end for span in spans)
    found = script(f"Timeline.find(lanes[0], {time / data['tick']})", data)
    holding = [i for i, span in enumerate(spans) if span.start <= time < span.end]
    near = any(abs(time - edge) <= 2 * data["tick"] for span in spans for edge in (span.start, span.end))
    assert near or found == (holding[0] if holding else -1)


@settings(max_examples=60)
@given(rows(), st.integers(0, 9), st.integers(1, 10))
def test_all_that_is_visible_is_drawn_at_its_size(script, spans, start, length):
    data = timeline_data(spans, [], "s")
    first, last = (TICKS * tenth / 10 for tenth in (start, min(start + length, 10)))
    drawn = script(f"Timeline.pieces(lanes[0], {first}, {last}, {WIDTH}, 4)", data)
    scale = WIDTH / (last - first)
    seen = [
        max(0.0, min(span.end / data["tick"], last) - max(span.start / data["tick"], first)) * scale
        for span in spans
    ]
    assert [piece["width"] for piece in drawn["spans"]] == pytest.approx(
        [width for width in seen if width >= 3], abs=1e-3
    )
    small = sum(width for width in seen if width < 3)
    assert sum(sum(one["shares"]) * one["width"] for one in drawn["columns"]) == pytest.approx(small, abs=1e-2)
    assert all(0 <= piece["x"] <= WIDTH for piece in (*drawn["spans"], *drawn["columns"]))


def test_a_long_step_is_drawn_with_few_elements(script):
    spans = simulate([[Chunk(1.0, 2.0)] * 4] * 4, 256)
    drawn = script(f"Timeline.pieces(lanes[0], 0, {TICKS}, {WIDTH}, 4)", timeline_data(spans, [], ""))
    assert len(drawn["spans"]) + len(drawn["columns"]) <= WIDTH / 3
    middle = [one["shares"] for one in drawn["columns"] if 300 < one["x"] < 700]
    forward, backward = (sum(shares[kind] for shares in middle) / len(middle) for kind in (0, 1))
    assert backward == pytest.approx(2 * forward, rel=0.02)
    assert forward + backward == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize(
    ("given", "expected"),
    [((-5, 20), (0, 25)), ((90, 120), (70, 100)), ((-50, 500), (0, 100)), ((50, 50), (50, 50.0001))],
)
def test_the_view_stays_within_the_step(script, given, expected):
    assert script(f"Timeline.window({given[0]}, {given[1]}, 100)") == pytest.approx(list(expected))


@pytest.mark.parametrize(
    ("span", "step", "told"),
    [((0, 103), 20, [0, 20, 40, 60, 80, 100]), ((0.31, 0.52), 0.05, [0.35, 0.4, 0.45, 0.5])],
)
def test_ticks_of_the_axis_are_round(script, span, step, told):
    found = script(f"Timeline.ticks({span[0]}, {span[1]}, 6)")
    assert found["step"] == pytest.approx(step)
    assert found["found"] == pytest.approx(told)


@pytest.mark.parametrize(
    ("value", "unit", "step", "told"),
    [(1.5, "s", 0.5, "1.5 s"), (0.0123, "s", 0.001, "12 ms"), (2e-5, "s", 1e-6, "20 µs"), (40, "", 20, "40")],
)
def test_times_in_words(script, value, unit, step, told):
    assert script(f"Timeline.time({value}, '{unit}', {step})") == told


def test_details_of_a_span(script):
    spans = [Span(1, "forward", 3, 2, 0.25, 0.35), Span(1, "communication", None, None, 0.75, 1.0, "send forward")]
    data = timeline_data([], spans, "s")
    assert script("Timeline.describe(data, lanes[0], 0)", data) == [
        "pp 1, measured: forward",
        "micro-batch 3, chunk 2",
        "250.0 ms to 350.0 ms, takes 100.0 ms",
    ]
    assert script("Timeline.describe(data, lanes[0], 1)", data)[0] == "pp 1, measured: send forward"


@pytest.mark.parametrize(("pp", "microbatches", "shown"), [(2, 64, 8.0), (2, 2, None), (1, 64, None)])
def test_a_long_pipeline_opens_at_its_warm_up(script, pp, microbatches, shown):
    """The first backward of the first rank begins after a forward of each, and the last rank's backward."""
    data = timeline_data(simulate([[Chunk(1.0, 2.0)]] * pp, microbatches), [], "s")
    found = script("Timeline.warmUp(data, lanes, data.end / data.tick)", data) * data["tick"]
    assert found == pytest.approx(shown or data["end"])
