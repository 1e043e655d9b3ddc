"""The screen of ``megasched status``, and what a log gets of it."""

import io
import math
from dataclasses import replace
from datetime import datetime, timedelta

import pytest
from rich.console import Console

from megasched.cli import status
from megasched.cli.status import print_status, span, summary, watch_run
from megasched.launch.slurm.client import SlurmJob
from megasched.launch.status.run_status import RunStatus
from megasched.launch.status.training_log import Checkpoint, RankTimes

NOW = datetime(2026, 11, 22, 15, 11, 5)
JOB = SlurmJob(
    "1",
    "llama-small",
    "RUNNING",
    nodes="node[1-2]",
    start=NOW - timedelta(hours=1),
    end=NOW + timedelta(hours=1),
    time_limit="02:00:00",
)
RUN = RunStatus(
    path="runs/llama",
    state="training",
    iteration=40,
    last=60,
    time=NOW - timedelta(seconds=2),
    loss=3.405821,
    grad_norm=0.6412,
    seconds=0.3164,
    samples_per_second=12.64,
    tokens_per_second=809.2,
    tokens_per_gpu=202.3,
    tflops=412.04,
    rank_times=RankTimes(NOW - timedelta(seconds=2), 13, 0.3112, 0, 0.0988),
    gpus=4,
    skipped=1,
    nan=0,
    restarts=1,
    validation_iteration=25,
    validation=3.624996,
    saved=Checkpoint(20, NOW - timedelta(minutes=3), "run/checkpoints"),
    saving=Checkpoint(40, NOW - timedelta(seconds=1), "run/checkpoints"),
    seconds_left=5400.0,
    trend=((1, 4.0), (20, 3.0), (40, 2.0)),
    slurm=JOB,
)


def printed(show, *, terminal=False, width=110):
    console = Console(file=io.StringIO(), width=width, force_terminal=terminal, color_system=None, markup=False)
    show(console)
    return console.file.getvalue()


def screen(found):
    return [line.rstrip() for line in printed(lambda console: print_status(found, console, NOW)).splitlines()]


def test_one_screen():
    assert screen(RUN) == [
        "training  runs/llama",
        "Slurm          job 1 llama-small: RUNNING on node[1-2], time limit 02:00:00 is over at 2026-11-22 16:11",
        "iteration      40 of 60  ━━━━━━━━━━━━━━━━━━━━            66.7 %",
        "loss           3.4058   validation 3.6250 at iteration 25",
        "               █▅▁  4.0000 → 2.0000",
        "gradient norm  0.641",
        "speed          0.316 s an iteration, 809 tokens/s, 202 a GPU (4 GPUs), 412.0 TFLOP/s a GPU",
        "ranks          slowest 13: 0.311 s in the forwards of an iteration; fastest 0: 0.099 s",
        "skipped        1 iterations, 0 with a loss of NaN",
        "restarts       1",
        "checkpoint     iteration 20, 15:08:05, 3 min ago, in run/checkpoints",
        "               being saved: iteration 40, since 15:11:04",
        "to finish      1 h 30 min, at 16:41:03, after the job's time limit: it has to be started again",
        "newest line    15:11:03, 2 s ago",
    ]


def test_a_run_that_failed_says_why_whole_paths_included():
    path = "/a/rather/long/path/of/a/run/in/some/folder/of/a/shared/file/system" * 2
    found = replace(RUN, state="failed", path=path, error="RuntimeError: [x]", error_log=f"{path}/logs/1.log")
    text = "".join(line.strip() for line in screen(found))
    assert text.startswith(f"failed{path}Slurm")
    assert text.endswith(f"RuntimeError: [x]in{path}/logs/1.log")


@pytest.mark.parametrize("name", ["[lr]", "[/x]"])
def test_names_with_brackets_stay_as_they_are(name):
    job, saved = replace(JOB, name=f"llama{name}"), Checkpoint(20, NOW, f"/ck/{name}/x")
    text = "\n".join(screen(replace(RUN, slurm=job, saved=saved, saving=saved)))
    assert f"job 1 llama{name}: RUNNING" in text
    assert f"in /ck/{name}/x" in text


def test_it_hangs_is_a_guess():
    found = screen(replace(RUN, state="hung", why="no new line for 12 min"))
    assert found[:2] == ["hung?  runs/llama", "no new line for 12 min"]


def test_a_job_that_waits():
    job = SlurmJob("7", "x", "PENDING", reason="Priority", start=NOW + timedelta(hours=2), time_limit="02:00:00")
    assert screen(RunStatus("runs/x", "waiting", slurm=job)) == [
        "waiting  runs/x",
        "Slurm  job 7 x: PENDING (Priority), start 2026-11-22 17:11",
    ]


def test_what_is_not_known_is_left_out():
    found = RunStatus("x.log", "training", iteration=1, last=3, time=NOW, loss=math.nan, seconds=0.5)
    assert screen(found) == [
        "training  x.log",
        "iteration    1 of 3  ━━━━━━━━━━                      33.3 %",
        "loss         nan",
        "speed        0.500 s an iteration",
        "skipped      0 iterations, 0 with a loss of NaN",
        "restarts     0",
        "checkpoint   none",
        "newest line  15:11:05, 0 s ago",
    ]


def test_a_loss_that_does_not_change():
    assert "▁▁" in screen(replace(RUN, trend=((1, 3.0), (2, 3.0))))[4]


def test_another_day_has_its_date():
    found = replace(RUN, time=NOW - timedelta(days=2))
    assert screen(found)[-1] == "newest line    2026-11-20 15:11, 2 d 0 h ago"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-3, "0 s"), (59.4, "59 s"), (60, "1 min"), (3599, "59 min"), (7500, "2 h 05 min"), (100_000, "1 d 3 h")],
)
def test_spans(seconds, text):
    assert span(seconds) == text


def test_one_line():
    assert summary(RUN, NOW) == (
        "2026-11-22 15:11:05  training, iteration 40 of 60, loss 3.4058, 809 tokens/s, checkpoint 20"
    )
    found = RunStatus("x", "failed", why="Slurm: FAILED", error="KeyError: 'x'")
    assert summary(found, NOW) == "2026-11-22 15:11:05  failed, Slurm: FAILED, KeyError: 'x'"


@pytest.fixture
def looks(monkeypatch):
    """A function that gives one status after the other, and the pauses between them."""
    pauses = []
    monkeypatch.setattr(status.time, "sleep", pauses.append)

    def make(*found):
        it = iter(found)
        return lambda: next(it), pauses

    return make


def test_a_log_gets_a_line_for_each_change(looks):
    look, pauses = looks(
        RUN, RUN, replace(RUN, time=NOW, iteration=42), replace(RUN, state="finished", slurm=None)
    )
    lines = printed(lambda console: watch_run(look, console, 3.0)).splitlines()
    assert [line.split("  ")[1].split(", loss")[0] for line in lines] == [
        "training, iteration 40 of 60",
        "training, iteration 42 of 60",
        "finished, iteration 40 of 60",
    ]
    assert pauses == [3.0, 3.0, 3.0]


def test_a_terminal_gets_the_screen_again_until_slurm_has_ended_the_job(looks):
    ending = replace(RUN, state="finished", slurm=replace(JOB, state="COMPLETING"))
    ended = replace(RUN, state="finished", slurm=replace(JOB, state="COMPLETED"))
    look, pauses = looks(RUN, ending, ended)
    text = printed(lambda console: watch_run(look, console, 3.0), terminal=True)
    assert 0 < text.index(": RUNNING") < text.index(": COMPLETING") < text.index(": COMPLETED")
    assert pauses == [3.0, 3.0]
