"""Through the night: whatever happens to nodes, network, controller and job, the run trains as if nothing had.

What happens most, to short runs of two ranks, comes to `make test`; all of it, to longer ones of four, to `make
test-all`.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from megasched.launch.run_folder import RunFolder
from tests.slurm.lab import Lab
from tests.slurm.training import LONG, SHORT, Size, Training

ITERATIONS, SAVE_INTERVAL = LONG.iterations, LONG.save_interval
_LONG = pytest.param(LONG, marks=pytest.mark.slow, id="long")
short_and_long = pytest.mark.parametrize(
    "size", [pytest.param(SHORT, id="short"), _LONG], indirect=True, scope="module"
)
long_alone = pytest.mark.parametrize("size", [_LONG], indirect=True, scope="module")

# As `auto`, and before the first restart a step takes a second more.
SLOW = """
import os
import time

from megasched.model_adapters.default_schedule import schedule as auto

def schedule(sch, layout):
    auto(sch, layout)
    seconds = 0.0 if "SLURM_RESTART_COUNT" in os.environ else 0.8
    sch["model.layers.0"].hook("fw_pre", lambda module, inputs: time.sleep(seconds))
"""
# As `auto`, and the first step fails.
BROKEN = """
from megasched.model_adapters.default_schedule import schedule as auto

def fail(module, inputs):
    raise RuntimeError("a GPU has fallen off the bus")

def schedule(sch, layout):
    auto(sch, layout)
    sch["model.layers.0"].hook("fw_pre", fail)
"""
# A first start on two loaded cores.
SECONDS = 300


@pytest.fixture(scope="module")
def size(request: pytest.FixtureRequest) -> Size:
    return request.param


@pytest.fixture(scope="module")
def undisturbed(lab: Lab, model: Path, size: Size, tmp_path_factory) -> Training:
    """The run that all others are compared with."""
    run = Training(lab, size, RunFolder(tmp_path_factory.mktemp("undisturbed")), model)
    lab.wait(run.submit(), "COMPLETED", seconds=SECONDS)
    return run


@pytest.fixture
def night(lab: Lab, model: Path, size: Size, tmp_path: Path) -> Training:
    return Training(lab, size, RunFolder(tmp_path), model)


@short_and_long
def test_undisturbed(undisturbed, size):
    (job,) = undisturbed.jobs
    assert undisturbed.starts(job) == [(job, 0)]
    assert sorted(undisturbed.iterations(job, 0)) == list(range(1, size.iterations + 1))
    undisturbed.check_saved()
    assert f"job {job}, restart 0: ended with status 0" in undisturbed.folder.batch_log(str(job)).read_text()


@short_and_long
def test_a_node_crashes(lab, night, undisturbed, size):
    job = night.submit()
    night.reach(job, size.save_interval + 1)
    lost = lab.nodes_of(job)[-1]
    lab.crash(lost)
    lab.wait(job, "COMPLETED", seconds=SECONDS)
    assert len(night.starts(job)) >= 2
    assert lost not in lab.nodes_of(job)
    night.check_equal(undisturbed, job)
    night.check_saved()


@short_and_long
def test_the_signal_to_save(lab, night, undisturbed, size):
    """It saves at once, off the interval, and goes on from there; Slurm sends this one when it is told to."""
    job = night.submit()
    night.reach(job, size.save_interval + 1)
    lab.run("scancel", "--batch", "--signal=USR1", str(job), check=True)
    lab.wait(job, "COMPLETED", seconds=SECONDS)
    said = night.folder.batch_log(str(job)).read_text()
    assert "its time is nearly over: the ranks save and end" in said
    assert "it has saved before its time was over: requeued" in said
    first, second = night.starts(job)
    assert (first, second) == ((job, 0), (job, 1))
    assert min(night.iterations(*second)) == max(night.iterations(*first)) + 1  # nothing is done twice
    night.check_equal(undisturbed, job)
    night.check_saved()


@short_and_long
def test_a_refused_command_is_not_restarted(lab, night):
    night.options = ("--hf-override", "no_such_field=1")
    job = night.submit()
    lab.wait(job, "FAILED", seconds=SECONDS)
    assert [restart for _, restart in night.starts(job)] == [0]
    assert "a restart mends neither" in night.folder.batch_log(str(job)).read_text()


@long_alone
def test_the_network_of_a_node_is_cut(lab, night, undisturbed):
    """Slurm takes the node for dead; its rank lives on, and must not touch the checkpoints of the next start."""
    job = night.submit()
    night.reach(job, 2 * SAVE_INTERVAL + 1)
    first = lab.nodes_of(job)[0]  # of the batch script, and of rank 0, which writes
    lab.cut(first)
    lab.wait(job, "COMPLETED", seconds=SECONDS)
    lab.heal(first)
    assert night.starts(job)[-1][1] >= 1
    assert first not in lab.nodes_of(job)
    night.check_equal(undisturbed, job)
    night.check_saved()


@long_alone
def test_requeued_by_hand(lab, night, undisturbed):
    job = night.submit()
    night.reach(job, SAVE_INTERVAL + 2)
    lab.run("scontrol", "requeue", str(job), check=True)
    lab.wait(job, "COMPLETED", seconds=SECONDS)
    assert night.starts(job) == [(job, 0), (job, 1)]
    night.check_equal(undisturbed, job)
    night.check_saved()


@long_alone
def test_preempted(lab, night, undisturbed):
    job = night.submit()
    night.reach(job, SAVE_INTERVAL + 2)
    _take_all_nodes(lab, night)
    lab.wait(job, "COMPLETED", seconds=SECONDS)
    assert night.starts(job) == [(job, 0), (job, 1)]
    night.check_equal(undisturbed, job)
    night.check_saved()


@long_alone
def test_preempted_with_time_to_save(lab, night, undisturbed):
    """Slurm sends the signal at preemption, too, where it is told to: nothing is done twice."""
    job = night.submit("--partition=patient")
    night.reach(job, SAVE_INTERVAL + 2)
    _take_all_nodes(lab, night)
    lab.wait(job, "COMPLETED", seconds=SECONDS)
    assert "it has saved before its time was over: requeued" in night.folder.batch_log(str(job)).read_text()
    first, second = night.starts(job)
    assert min(night.iterations(*second)) == max(night.iterations(*first)) + 1
    night.check_equal(undisturbed, job)
    night.check_saved()


def _take_all_nodes(lab, night):
    """A job that comes before others has them for a moment."""
    script = night.folder.path / "urgent.sbatch"
    script.write_text("#!/bin/bash\nsleep 2\n")
    urgent = lab.submit(script, "--partition=urgent", f"--nodes={lab.cluster.nodes}", "--exclusive")
    lab.wait(urgent, "COMPLETED", seconds=SECONDS)


@long_alone
def test_the_signal_before_the_time_limit(lab, night, undisturbed):
    """Slurm's own, by the limit of the job: it saves at once, off the interval, and goes on from there.

    It comes 90 to 120 seconds after the start: Slurm looks twice a minute, and half a minute ahead.
    """
    schedule = night.folder.path / "slow.py"
    schedule.write_text(SLOW)
    night.options = ("--model-schedule", str(schedule), "--allow-unverified")
    night.changes = {"time": "3", "minutes_to_save": 1}
    job = night.submit()
    lab.wait(job, "COMPLETED", seconds=SECONDS)
    said = night.folder.batch_log(str(job)).read_text()
    assert "its time is nearly over: the ranks save and end" in said
    assert "it has saved before its time was over: requeued" in said
    starts = night.starts(job)
    assert len(starts) >= 2
    for before, after in pairwise(starts):  # nothing is done twice
        assert min(night.iterations(*after)) == max(night.iterations(*before)) + 1
    night.check_equal(undisturbed, job)
    night.check_saved()


@long_alone
def test_cancelled_and_submitted_again(lab, night, undisturbed):
    job = night.submit()
    night.reach(job, 2 * SAVE_INTERVAL + 2)
    lab.run("scancel", str(job), check=True)
    lab.wait(job, "CANCELLED", seconds=60)
    saved = night.last_saved()
    assert saved >= 2 * SAVE_INTERVAL
    again = night.submit()
    lab.wait(again, "COMPLETED", seconds=SECONDS)
    assert min(night.iterations(again, 0)) == saved + 1
    assert lab.job(job)["JobState"] == "CANCELLED"
    night.check_equal(undisturbed, job, again)
    night.check_saved()


@long_alone
def test_the_controller_is_restarted(lab, night, undisturbed):
    job = night.submit()
    night.reach(job, SAVE_INTERVAL)
    lab.restart_controller()
    lab.wait(job, "COMPLETED", seconds=SECONDS)
    assert night.starts(job) == [(job, 0)]
    night.check_equal(undisturbed, job)
    night.check_saved()


@long_alone
def test_two_jobs_in_a_chain(lab, night, undisturbed):
    night.options = ("--exit-interval", str(ITERATIONS // 2))
    first = night.submit("--dependency=singleton")
    second = night.submit("--dependency=singleton")
    assert lab.state(second) == "PENDING"
    lab.wait(second, "COMPLETED", seconds=SECONDS)
    assert sorted(night.iterations(second, 0)) == list(range(ITERATIONS // 2 + 1, ITERATIONS + 1))
    night.check_equal(undisturbed, first, second)
    night.check_saved()


@long_alone
def test_restarts_that_bring_nothing_end(lab, night):
    schedule = night.folder.path / "broken.py"
    schedule.write_text(BROKEN)
    night.options = ("--model-schedule", str(schedule), "--allow-unverified")
    night.changes = {"max_restarts": 1}
    job = night.submit()
    lab.wait(job, "FAILED", seconds=SECONDS)
    said = night.folder.batch_log(str(job)).read_text()
    assert [restart for _, restart in night.starts(job)] == [0, 1, 2]
    assert "1 restarts have brought no checkpoint after iteration 0: given up" in said


@long_alone
def test_by_torchrun(lab, night, undisturbed):
    """One task a node; the ranks meet over the nodes' own addresses, and the signal does torchrun no harm."""
    night.changes = {"torchrun": True}
    job = night.submit()
    night.reach(job, SAVE_INTERVAL + 1)
    lab.run("scancel", "--batch", "--signal=USR1", str(job), check=True)
    lab.wait(job, "COMPLETED", seconds=SECONDS)
    assert "it has saved before its time was over: requeued" in night.folder.batch_log(str(job)).read_text()
    assert night.starts(job) == [(job, 0), (job, 1)]
    night.check_equal(undisturbed, job)
    night.check_saved()
