"""Fixtures for the tests of a run's status."""

import os
from datetime import datetime

import pytest

from megasched.errors import ConfigError
from megasched.launch.run_folder import RunFolder
from megasched.launch.status import run_status
from tests.launch.status.runs import FIRST


@pytest.fixture(autouse=True)
def no_slurm(monkeypatch):
    """Slurm knows no job, wherever the tests run."""

    def ask(job_id):
        raise ConfigError(f"job {job_id}: unknown")

    monkeypatch.setattr(run_status, "ask_slurm", ask)


@pytest.fixture
def run(tmp_path):
    """A run's folder with a function to write logs: ``run(restart, node, lines, modified)``."""
    folder = RunFolder(tmp_path / "run")

    def write(restart, node, lines, modified, *, log=None):
        path = log or folder.node_log("1", restart, node)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"{line}\n" for line in lines))
        os.utime(path, (modified.timestamp(),) * 2)
        return path

    write.folder = folder
    return write


@pytest.fixture
def halfway(run):
    """A run in its first start, at iteration 28, without an end; returns when its last line came."""
    went = [line for line in FIRST[0] if "slurmstepd" not in line]
    at = datetime(2026, 11, 22, 15, 10, 32, 982120)
    run(0, 0, went, at)
    run(0, 1, FIRST[1], at)
    return at
