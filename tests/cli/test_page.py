"""What the page is made of: micro-batches, predicted steps, and recorded ones laid over them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megasched.cli.page.page import build_page
from megasched.cli.page.recorded import recorded_step
from megasched.cli.show.step import microbatches_of, step_options
from megasched.errors import ConfigError
from megasched.planner.pipeline import Chunk, order_of
from megasched.planner.predict import StepFlags
from megasched.trace.chrome_trace import RankCoordinates, trace_pieces
from megasched.trace.timeline import Span
from tests.cli.pages import page_of, predicted, report_of


def write_trace(path, pp, vpp, microbatches, seconds=0.5, tp=2, missing_ranks=()):
    """Of ranks that do one thing after the other, each so long; two iterations, all TP ranks."""
    ranks = []
    for rank in range(pp * tp):
        work = order_of(rank // tp, pp, vpp, microbatches)
        spans = [
            Span(
                rank, "forward" if w.forward else "backward", w.microbatch, w.chunk, i * seconds, (i + 1) * seconds
            )
            for i, w in enumerate(work)
        ]
        optimizer = Span(rank, "optimizer", None, None, len(work) * seconds, (len(work) + 1) * seconds)
        ranks.append((rank, RankCoordinates(rank // tp, rank % tp, 0), {11: spans, 12: [*spans, optimizer]}))
    path.write_text("".join(trace_pieces(ranks, {"clock_error": 3e-5, "missing_ranks": missing_ranks})))
    return path


def test_a_step_has_some_microbatches_for_each_rank():
    page = build_page(report_of(4, 1))
    assert page.report.step.microbatches == 16
    assert len(page.predicted) == 4 * 16 * 2
    assert (page.unit, page.measured) == ("", [])


def test_a_batch_is_cut_into_microbatches():
    layout = replace(report_of(2, 2).layout, micro_batch_size=3, data_parallel_size=5)
    assert microbatches_of(layout, 60) == 4


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (31, "--global-batch-size 31 is no multiple of 2: micro-batches of 2 on 1 DP ranks"),
        (6, "--global-batch-size 6 makes 3 micro-batches: interleaving .VPP. needs a multiple of PP 2"),
    ],
)
def test_a_batch_that_does_not_fit_is_refused(batch, message):
    with pytest.raises(ConfigError, match=message):
        microbatches_of(replace(report_of(2, 2).layout, micro_batch_size=2), batch)


def test_without_a_prediction_flops_make_one():
    page = page_of(pp=2, vpp=2, microbatches=2)
    first = next(span for span in page.predicted if span.rank == 0)
    assert (first.start, first.end) == (0.0, 1.0)
    assert {span.seconds for span in page.predicted if span.kind == "backward"} == {2.0}
    assert "times are relative, 1 is the forward of an average chunk" in page.notes[0]


def test_a_prediction_is_taken_as_it_is():
    page = page_of(pp=1, vpp=1, microbatches=1, prediction=predicted([[Chunk(0.25, 0.5)]]))
    assert page.predicted == [Span(0, "forward", 0, 0, 0.0, 0.25), Span(0, "backward", 0, 0, 0.25, 0.75)]
    assert (page.unit, page.notes) == ("s", [])


def test_a_trace_is_laid_over_as_much_predicted_work(tmp_path):
    path = write_trace(tmp_path / "trace.json", pp=2, vpp=2, microbatches=4)
    recorded = recorded_step(path, report_of(2, 2).layout)
    assert recorded.microbatches == 4
    page = build_page(report_of(2, 2, microbatches=4), recorded)
    assert len(page.measured) == 2 * (4 * 2 * 2 + 1)  # of one TP rank, the last iteration
    assert {span.rank for span in page.measured} == {0, 1}
    assert page.unit == "s"
    assert sum(span.seconds for span in page.predicted) == pytest.approx(2 * 16 * 0.5)
    assert "iteration 12 of trace.json" in page.notes[0]
    assert "0.030 ms" in page.notes[0]


def test_a_trace_without_some_ranks_tells_less_of_its_layout(tmp_path):
    path = write_trace(tmp_path / "trace.json", pp=2, vpp=1, microbatches=4, tp=1, missing_ranks=[1, 3])
    assert recorded_step(path, report_of(2, 1).layout).microbatches == 4


def test_a_trace_of_another_layout_or_batch_is_refused(tmp_path):
    path = write_trace(tmp_path / "trace.json", pp=2, vpp=1, microbatches=4)
    with pytest.raises(ConfigError, match=r"are of PP 2 and VPP 1, and this layout has PP 2 and VPP 2"):
        recorded_step(path, report_of(2, 2).layout)
    layout = report_of(2, 1).layout
    for change in ({"tensor_model_parallel_size": 1}, {"data_parallel_size": 2}, {"context_parallel_size": 2}):
        with pytest.raises(ConfigError, match=r"its ranks are of TP 2, CP 1 and DP 1, and this layout has TP"):
            recorded_step(path, replace(layout, **change))
    with pytest.raises(
        ConfigError, match=r"its steps have 4 micro-batches, those of --global-batch-size 6 have 6"
    ):
        step_options(layout, StepFlags(), None, 6, recorded_step(path, layout))
