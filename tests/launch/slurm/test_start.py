"""What is left in a run's folder, and what is not."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from megasched.errors import ConfigError
from megasched.launch.jobs.checks import Checks
from megasched.launch.run_folder import RunFolder
from megasched.launch.slurm.client import refused_by_slurm
from megasched.launch.slurm.start import enqueue, prepare, write
from tests.launch.slurm.test_script import JOB

SBATCH = """#!/bin/sh
echo "$@" >>"$0.calls"
case "$*" in
*--test-only*) echo "sbatch: Job 9 to start at soon" >&2; exit "${TEST_ONLY:-0}" ;;
esac
[ "$(wc -l <"$0.calls")" -le "${MOST:-99}" ] || { echo "sbatch: error: QOSMaxSubmitJobPerUserLimit" >&2; exit 1; }
echo "$(wc -l <"$0.calls");cluster"
"""


@pytest.fixture
def sbatch(tmp_path, monkeypatch) -> Path:
    path = tmp_path / "bin" / "sbatch"
    path.parent.mkdir()
    path.write_text(SBATCH)
    path.chmod(0o755)
    monkeypatch.setenv("PATH", str(path.parent), prepend=os.pathsep)
    return path


@pytest.fixture
def job(tmp_path):
    return replace(JOB, run_folder=tmp_path / "run")


def test_written_and_submitted(sbatch, job):
    script = write(prepare(job, Checks(check_run=False)))
    folder = RunFolder(job.run_folder)
    assert script == folder.script
    assert os.access(script, os.X_OK)
    assert folder.logs.is_dir()  # where Slurm writes, it makes no folders
    assert enqueue(folder) == ["2"]
    known = json.loads(folder.description.read_text())
    assert known["jobs"] == ["2"]
    assert (known["job"]["nodes"], known["job"]["script"]) == (8, "pretrain_gpt.py")


def test_a_chain_waits_for_itself(sbatch, job):
    write(prepare(job, Checks(check_run=False)))
    assert enqueue(RunFolder(job.run_folder), 3) == ["2", "3", "4"]
    script = f"{job.run_folder}/job.sbatch"
    assert (
        Path(f"{sbatch}.calls").read_text().splitlines()[1:] == [f"--parsable --dependency=singleton {script}"] * 3
    )


def test_a_chain_of_which_slurm_takes_a_beginning(sbatch, job, monkeypatch):
    """A user who knows of no job starts the chain again, and two runs write into one folder."""
    write(prepare(job, Checks(check_run=False)))
    folder = RunFolder(job.run_folder)
    monkeypatch.setenv("MOST", "3")
    with pytest.raises(
        ConfigError, match=r"QOSMaxSubmitJobPerUserLimit\n2 of 3 are in the queue \(2, 3\): `scancel` ends"
    ):
        enqueue(folder, 3)
    assert folder.described()["jobs"] == ["2", "3"]
    with pytest.raises(ConfigError, match=r"QOSMaxSubmitJobPerUserLimit$"):
        enqueue(folder, 3)


def test_an_edited_script_is_kept(sbatch, job):
    script = write(prepare(job, Checks(check_run=False)))
    script.write_text("mine")
    write(prepare(job, Checks(check_run=False)))
    write(prepare(replace(job, nodes=4), Checks(check_run=False)))
    assert (script.with_name("job.sbatch.1")).read_text() == "mine"
    assert "--nodes=8" in script.with_name("job.sbatch.2").read_text()
    assert "--nodes=4" in script.read_text()
    script.with_name("job.sbatch.1").unlink()  # whoever tidies up loses no other one
    write(prepare(replace(job, nodes=2), Checks(check_run=False)))
    assert "--nodes=4" in script.with_name("job.sbatch.1").read_text()
    assert "--nodes=8" in script.with_name("job.sbatch.2").read_text()


@pytest.mark.parametrize(("mask", "mode"), [(0o077, 0o700), (0o022, 0o755), (0o027, 0o750)])
def test_nobody_reads_a_script_who_reads_no_other_file(sbatch, job, mask, mode):
    """It has the variables of --env, keys to services among them."""
    before = os.umask(mask)
    try:
        script = write(prepare(job, Checks(check_run=False)))
    finally:
        os.umask(before)
    assert script.stat().st_mode & 0o777 == mode
    assert script.with_name("job.json").stat().st_mode & 0o777 == mode & 0o666


def test_what_slurm_refuses_is_not_written(sbatch, job, monkeypatch):
    monkeypatch.setenv("TEST_ONLY", "1")
    with pytest.raises(ConfigError, match=r"was not submitted:\n  - Slurm: Job 9 to start at soon"):
        prepare(job, Checks(check_run=False))
    assert not job.run_folder.exists()


def test_without_slurm_it_is_said(job, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"sbatch: it can't be started .*--dry-run prints the script anywhere"):
        refused_by_slurm(tmp_path / "job.sbatch")
