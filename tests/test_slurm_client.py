"""Slurm's programs and its words, with stand-ins on PATH."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from megasched import slurm
from megasched.errors import ConfigError
from megasched.slurm import Life, NoAnswerError

PACKAGE = Path(slurm.__file__).parent


@pytest.fixture
def program(tmp_path, monkeypatch):
    def write(name: str, text: str) -> None:
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)

    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/usr/bin:/bin")
    return write


@pytest.mark.parametrize(
    ("state", "life"),
    [
        *(("RESIZING", Life.RUNS), ("COMPLETING", Life.RUNS), ("STOPPED", Life.RUNS)),
        *(("PENDING", Life.WAITS), ("REQUEUE_FED", Life.WAITS), ("SUSPENDED", Life.WAITS)),
        *(("COMPLETED", Life.ENDED), ("CANCELLED", Life.ENDED), ("NODE_FAIL", Life.ENDED), ("", Life.UNKNOWN)),
    ],
)
def test_what_a_state_means(state, life):
    assert slurm.life(state) is life


def test_no_state_is_of_two_kinds():
    assert not slurm.WAITING & slurm.RUNNING
    assert not (slurm.WAITING | slurm.RUNNING) & (slurm.FAILED | {slurm.COMPLETED})
    assert slurm.ENDING < slurm.RUNNING


def test_a_program_that_does_not_end_is_ended(program):
    program("squeue", "exec sleep 60")
    with pytest.raises(NoAnswerError, match=r"^squeue did not answer within 0\.2 s: is slurmctld up\?$"):
        slurm.call(["squeue"], seconds=0.2)


def test_a_connection_that_breaks_is_no_answer(program):
    """A program of Slurm that writes to a controller which has hung up dies of SIGPIPE, and says nothing."""
    program("squeue", "kill -PIPE $$")
    with pytest.raises(NoAnswerError, match=r"^squeue: its connection to Slurm broke: is slurmctld up\?$"):
        slurm.queue_state("7")
    assert not slurm.has_processes("7")


def test_a_controller_that_is_away_is_no_answer(program):
    program(
        "squeue", "echo 'slurm_load_jobs error: Unable to contact slurm controller (connect failure)' >&2; exit 1"
    )
    with pytest.raises(NoAnswerError, match="squeue does not reach Slurm"):
        slurm.queue_state("7")
    assert not slurm.has_processes("7")


def test_a_job_that_the_queue_has_forgotten_has_no_state(program):
    program("squeue", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    assert slurm.queue_state("7") == ""


@pytest.mark.parametrize(("answer", "found"), [("FAILED|0:9", ("FAILED", -9)), ("FAILED|3:0", ("FAILED", 3))])
def test_the_accounting_is_asked_first(program, answer, found):
    program("sacct", f"echo '{answer}'")
    assert slurm.state_and_status("7") == found


@pytest.mark.parametrize("accounting", ["exit 0", "echo 'sacct: error: Connection refused' >&2; exit 1"])
def test_the_queue_is_asked_where_the_accounting_tells_nothing(program, accounting):
    program("sacct", accounting)
    program("squeue", "echo RESIZING")
    assert slurm.state_and_status("7") == ("RESIZING", 0)


@pytest.mark.parametrize(("state", "goes_on"), [("RESIZING", True), ("SIGNALING", True), ("COMPLETING", False)])
def test_whether_processes_go_on(program, state, goes_on):
    program("squeue", f"echo {state}")
    assert slurm.has_processes("7") is goes_on


def test_a_program_that_is_missing(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"^sbatch: it can't be started .*; use a login node$"):
        slurm.submit(["x"], remedy="use a login node")


def test_nothing_else_calls_slurms_programs():
    roots = [PACKAGE, PACKAGE.parent / "launch"]
    called = re.compile(r"\[\s*\"(sacct|squeue|scontrol|scancel|sbatch)\"")
    with_calls = {path.name for root in roots for path in root.rglob("*.py") if called.search(path.read_text())}
    assert with_calls == {"slurm.py", "client.py", "tune.py"}  # asks by `call`, prints
