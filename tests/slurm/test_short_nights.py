"""What happens to most runs under Slurm: they are refused, signalled, lose a node, or come to their end."""

from __future__ import annotations

from pathlib import Path

import pytest

from megasched.launch.run_folder import RunFolder
from tests.slurm.lab import Lab
from tests.slurm.training import SHORT, Training

ITERATIONS, SAVE_INTERVAL = SHORT.iterations, SHORT.save_interval
SECONDS = 150  # for a start and its end on two loaded cores


@pytest.fixture(scope="module")
def undisturbed(lab: Lab, model: Path, tmp_path_factory) -> Training:
    """The run that all others are compared with."""
    run = Training(lab, SHORT, RunFolder(tmp_path_factory.mktemp("undisturbed")), model)
    lab.wait(run.submit(), "COMPLETED", seconds=SECONDS)
    return run


@pytest.fixture
def night(lab: Lab, model: Path, tmp_path: Path) -> Training:
    return Training(lab, SHORT, RunFolder(tmp_path), model)


def test_undisturbed(undisturbed):
    (job,) = undisturbed.jobs
    assert undisturbed.starts(job) == [(job, 0)]
    assert sorted(undisturbed.iterations(job, 0)) == list(range(1, ITERATIONS + 1))
    undisturbed.check_saved()
    assert f"job {job}, restart 0: ended with status 0" in undisturbed.folder.batch_log(str(job)).read_text()


def test_a_node_crashes(lab, night, undisturbed):
    job = night.submit()
    night.reach(job, SAVE_INTERVAL + 1, seconds=SECONDS)
    lost = lab.nodes_of(job)[-1]
    lab.crash(lost)
    lab.wait(job, "COMPLETED", seconds=SECONDS)
    assert len(night.starts(job)) >= 2
    assert lost not in lab.nodes_of(job)
    night.check_equal(undisturbed, job)
    night.check_saved()


def test_the_signal_before_the_time_limit(lab, night, undisturbed):
    """It saves at once, off the interval, and goes on from there; Slurm sends this one when it is told to."""
    job = night.submit()
    night.reach(job, SAVE_INTERVAL + 1, seconds=SECONDS)
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


def test_a_refused_command_is_not_restarted(lab, night):
    night.options = ("--hf-override", "no_such_field=1")
    job = night.submit()
    lab.wait(job, "FAILED", seconds=SECONDS)
    assert [restart for _, restart in night.starts(job)] == [0]
    assert "a restart mends neither" in night.folder.batch_log(str(job)).read_text()
