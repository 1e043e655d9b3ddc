"""Runs in rehearsal with ``--megasched-trace``: what is recorded is what Megatron's schedules do."""

from __future__ import annotations

import argparse
import contextlib
import json
from collections import Counter
from itertools import pairwise

import pytest

from megasched.planner.pipeline import Work, order_of
from megasched.trace import run_trace
from megasched.trace.chrome_trace import RankCoordinates, read_trace
from megasched.trace.run_trace import RunTrace
from megasched.verify.trainer_run import losses, train
from tests import tiny

MICROBATCHES = 4  # of 2 sequences, of the 8 of a step
RECORD = "--profile-step-start 1 --profile-step-end 2"
LAYOUTS = {
    "pp2-vpp2": (2, 2, 2, "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"),
    "pp4": (4, 4, 1, "--pipeline-model-parallel-size 4"),
    "tp2": (2, 1, 1, "--tensor-model-parallel-size 2"),
}


def _train(folder, flags, iterations=2):
    """Losses, and whether Megatron is itself again after the step that was recorded."""
    report = train(folder, flags, iterations=iterations)
    from megatron.core.pipeline_parallel import p2p_communication, schedules

    hooked = (
        schedules.forward_step,
        schedules.backward_step,
        p2p_communication.P2PCommunicator._communicate,
    )
    return report, [hasattr(function, "__wrapped__") for function in hooked]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.save("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def recorded(ranks, folder, tmp_path_factory):
    """A run at a layout, when first asked for: its file, and what its ranks report."""
    made = {}

    def get(layout):
        if layout not in made:
            world, _, _, flags = LAYOUTS[layout]
            file = tmp_path_factory.mktemp(layout) / "trace.json"
            reports = ranks.run(
                world, _train, folder, [*flags.split(), *RECORD.split(), "--megasched-trace", str(file)]
            )
            made[layout] = file, reports
        return made[layout]

    return get


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_rank_does_what_is_predicted_in_that_order(recorded, layout):
    world, pp, vpp, _ = LAYOUTS[layout]
    file, _ = recorded(layout)
    trace = read_trace(file)
    assert list(trace.iterations) == [2]
    for rank in range(world):
        spans = [s for s in trace.iterations[2] if s.rank == rank]
        work = [
            Work(s.kind == "forward", s.microbatch, s.chunk) for s in spans if s.kind in ("forward", "backward")
        ]
        assert work == order_of(trace.places[rank].pp, pp, vpp, MICROBATCHES)
        # One after the other on each rank, the optimizer last.
        assert all(one.start <= one.end <= next.start for one, next in pairwise(spans))
        assert spans[-1].kind == "optimizer"
        assert [s.name for s in spans].count("finalize gradients") == 1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_sent_is_received(recorded, layout):
    _, pp, vpp, _ = LAYOUTS[layout]
    spans = read_trace(recorded(layout)[0]).iterations[2]
    done = Counter(part for s in spans if s.kind == "communication" for part in s.name.split(", "))
    borders = MICROBATCHES * (pp * vpp - 1)
    for what in ("send forward", "receive forward", "send backward", "receive backward"):
        assert done[what] == borders
    waits = {name: count for name, count in done.items() if name.startswith("wait for ")}
    assert bool(waits) == (layout == "pp2-vpp2")  # Megatron overlaps where it interleaves


def test_waiting_stands_between_the_stages(recorded):
    """The chunk after can't begin before the chunk before has ended: the clocks of the ranks agree on that."""
    for layout in ("pp2-vpp2", "pp4"):
        _, pp, vpp, _ = LAYOUTS[layout]
        trace = read_trace(recorded(layout)[0])
        assert trace.clock_error == 0.0  # one machine
        found = {
            (s.kind, s.microbatch, s.chunk * pp + s.rank): s for s in trace.iterations[2] if s.chunk is not None
        }
        for microbatch in range(MICROBATCHES):
            for stage in range(pp * vpp - 1):
                before, after = (found["forward", microbatch, place] for place in (stage, stage + 1))
                assert after.start > before.end
                before, after = (found["backward", microbatch, place] for place in (stage + 1, stage))
                assert after.start > before.end


def test_the_file_is_what_perfetto_reads(recorded):
    file, _ = recorded("tp2")
    found = json.loads(file.read_text())
    names = {e["pid"]: e["args"]["name"] for e in found["traceEvents"] if e["name"] == "process_name"}
    assert names == {0: "rank 0: pp 0, tp 0, dp 0", 1: "rank 1: pp 0, tp 1, dp 0"}
    events = [event for event in found["traceEvents"] if event["ph"] == "X"]
    assert {event["cat"] for event in events} == {"forward", "backward", "communication", "optimizer"}
    assert all(event["args"]["iteration"] == 2 and event["dur"] >= 0 for event in events)
    assert read_trace(file).places == {0: RankCoordinates(0, 0, 0), 1: RankCoordinates(0, 1, 0)}
    assert [path.name for path in file.parent.iterdir()] == ["trace.json"]  # no parts are left


def test_nothing_stays_changed_and_nothing_else_comes_out(ranks, folder, recorded):
    _, reports = recorded("pp2-vpp2")
    plain = ranks.run(2, _train, folder, LAYOUTS["pp2-vpp2"][3].split())
    assert [hooked for _, hooked in reports] == [[False] * 3] * 2
    assert losses([report for report, _ in reports]) == losses([report for report, _ in plain])


def _train_by_events(folder, flags):
    """With the clock of a GPU, whose events a rehearsal emulates."""
    from megasched.trace import clocks

    wall, clocks.WallClock = clocks.WallClock, clocks.CudaClock
    try:
        return train(folder, flags, iterations=2)
    finally:
        clocks.WallClock = wall


def test_events_of_a_device_tell_the_same(ranks, folder, tmp_path):
    file = tmp_path / "trace.json"
    flags = [*LAYOUTS["tp2"][3].split(), *RECORD.split(), "--megasched-trace", str(file)]
    ranks.run(2, _train_by_events, folder, flags)
    spans = read_trace(file).iterations[2]
    for rank in (0, 1):
        own = [span for span in spans if span.rank == rank]
        kinds = [span.kind for span in own]
        assert kinds == ["forward", "backward"] * MICROBATCHES + ["communication", "optimizer"]
        assert all(1e-4 < span.seconds < 20 for span in own if span.kind in ("forward", "backward"))


def _train_and_fail_to_write(folder, file, flags):
    """Rank 1 finds no room for its part; how long rank 0 waits for it is cut short."""
    import torch

    from megasched.trace import gather, run_trace

    def no_room(*_):
        raise OSError(28, "No space left on device")

    write, wait = run_trace.write_part, gather.gather
    run_trace.gather = lambda *args: wait(*args, seconds=0.2)
    if torch.distributed.get_rank() == 1:
        run_trace.write_part = no_room
    try:
        return train(folder, [*flags, "--megasched-trace", file], iterations=3)
    finally:
        run_trace.write_part, run_trace.gather = write, wait


def test_a_rank_that_can_not_write_ends_nothing(ranks, folder, tmp_path):
    file = tmp_path / "trace.json"
    flags = [*LAYOUTS["tp2"][3].split(), *RECORD.split()]
    reports = ranks.run(2, _train_and_fail_to_write, folder, str(file), flags)
    assert [report.iterations for report in reports] == [3, 3]
    assert list(read_trace(file).places) == [0]
    assert json.loads(file.read_text())["otherData"]["missing_ranks"] == [1]


def _train_and_listen(folder, flags):
    import contextlib
    import io

    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        train(folder, flags, iterations=2)
    return said.getvalue()


@pytest.mark.parametrize(
    ("begun", "exit_interval", "last", "skipped", "final"),
    [
        (0, None, 100, [], 14),
        (0, 4, 4, [], None),
        (0, 12, 12, [], 12),
        (6, 6, 12, [], 12),
        (0, 200, 100, [], 14),
        (0, None, 100, [13, 14], 12),
        (0, 12, 12, [12], 11),
        (0, None, 100, [11, 12, 13, 14], None),
    ],
)
def test_a_run_that_ends_amid_what_is_recorded_writes_it(monkeypatch, begun, exit_interval, last, skipped, final):
    """At an iteration that --exit-interval divides, after the one from which it goes on, or the last made."""
    said, written = [], []
    monkeypatch.setattr(run_trace, "_say", said.append)
    monkeypatch.setattr(run_trace, "listening", lambda *given: contextlib.nullcontext())
    monkeypatch.setattr(RunTrace, "_begin", lambda trace: setattr(trace, "recorder", argparse.Namespace()))
    monkeypatch.setattr(RunTrace, "_finish", lambda trace: written.append(trace.recorder.iteration))
    steps = {"profile_step_start": 10, "profile_step_end": 14, "train_iters": 100}
    trace = RunTrace(
        argparse.Namespace(
            megasched_trace="x", **steps, exit_interval=exit_interval, iteration=begun, iterations_to_skip=skipped
        )
    )
    for iteration in range(begun, last):
        if iteration + 1 not in skipped:
            trace.step(lambda: None, {"iteration": iteration, "optimizer": None, "config": None})
    assert written == ([] if final is None else [final])
    assert [f"makes the iterations 1 to {last}" in one for one in said] == [True] * (final is None)
    assert ["without those of --iterations-to-skip" in one for one in said] == [bool(skipped)] * (final is None)


def test_a_run_that_ends_before_says_so(ranks, folder, tmp_path):
    (said,) = ranks.run(1, _train_and_listen, folder, ["--megasched-trace", str(tmp_path / "trace.json")])
    assert "makes the iterations 1 to 2, and --profile-step-start 10 --profile-step-end 12 names 11 to 12" in said
    assert not list(tmp_path.iterdir())
