"""Trials as Slurm jobs, with stand-ins for Slurm's programs on PATH."""

import os
import stat
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from megasched.errors import ConfigError
from megasched.tuner.runner import SlurmRunner
from megasched.tuner.space import Space

TRAINER = Path(__file__).with_name("trainer.py")

# sbatch runs the job at once, its output where it is told, and leaves how it ended for sacct.
PROGRAMS = {
    "sbatch": """
printf '%s\\n' "$@" > words
case " $* " in *" --reject "*) echo "sbatch: error: invalid partition" >&2; exit 1;; esac
log=$3
shift 3
PYTHON "$@" > "$log" 2>&1
echo $? > status
echo "42;cluster"
""",
    "sacct": """
states=$(cat states)
echo "${states#*,}" > states
read -r status < status
case ${states%%,*} in
    NONE) ;;
    END) if [ "$status" = 0 ]; then echo "COMPLETED|0:0"; else echo "FAILED|$status:0"; fi;;
    *) echo "${states%%,*}|0:0";;
esac
[ "$2" = 42 ]
""",
    "squeue": "cat queue",
    "scancel": 'echo "$1" > cancelled',
}


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """The folder of the stand-ins; ``states`` holds what sacct says, one after the other."""
    for name, text in PROGRAMS.items():
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\ncd {tmp_path}\n" + text.replace("PYTHON", sys.executable))
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    (tmp_path / "states").write_text("PENDING,RUNNING,END")
    return tmp_path


def run(folder, batch, *more, timeout=60.0):
    space = Space()
    space.choice("micro_batch_size", [1, 4, 8])
    runner = SlurmRunner([str(TRAINER), *more], space, folder / "logs", timeout=timeout, iterations=6)
    runner.poll_seconds = 0.05
    return runner.run(3, {"micro_batch_size": batch})


def test_a_job_is_submitted_waited_for_and_its_log_read(slurm):
    assert run(slurm, 4).score == pytest.approx(4 / 0.014)
    log = slurm / "logs" / "trial-3.log"
    assert (slurm / "words").read_text().splitlines() == [
        *("--parsable", "--output", str(log), str(TRAINER), "--micro-batch-size", "4"),
        *("--exit-interval", "6", "--log-interval", "1"),
    ]
    assert not (slurm / "cancelled").exists()


def test_what_slurm_says_of_a_job_that_failed(slurm):
    assert run(slurm, 8).outcome == "oom"  # by its log
    (slurm / "states").write_text("RUNNING,OUT_OF_MEMORY")
    assert run(slurm, 1).outcome == "oom"
    (slurm / "states").write_text("TIMEOUT")
    assert run(slurm, 1).outcome == "timeout"
    (slurm / "states").write_text("CANCELLED by 100")
    assert run(slurm, 1).why == "Slurm: CANCELLED"


def test_without_accounting_the_queue_is_asked_and_the_log_judged(slurm):
    (slurm / "states").write_text("NONE")
    assert run(slurm, 1).outcome == "ok"
    assert run(slurm, 8).outcome == "oom"


def test_a_job_that_runs_too_long_is_cancelled_and_one_that_waits_is_not(slurm):
    (slurm / "states").write_text(",".join(["PENDING"] * 6 + ["END"]))
    assert run(slurm, 1, timeout=0.1).outcome == "ok"
    (slurm / "states").write_text("NONE")
    (slurm / "queue").write_text("RUNNING")
    assert run(slurm, 1, timeout=0.1).outcome == "timeout"
    assert (slurm / "cancelled").read_text() == "42\n"


def test_ctrl_c_cancels_the_job(slurm, monkeypatch):
    def interrupt(seconds):
        raise KeyboardInterrupt

    # Of that file alone: subprocess sleeps, too, while it waits for Slurm's programs.
    monkeypatch.setattr("megasched.tuner.runner.time", SimpleNamespace(sleep=interrupt, monotonic=time.monotonic))
    with pytest.raises(KeyboardInterrupt):
        run(slurm, 1)
    assert (slurm / "cancelled").read_text() == "42\n"


def test_a_job_that_is_not_accepted_ends_the_search(slurm):
    with pytest.raises(ConfigError, match="sbatch failed: invalid partition"):
        run(slurm, 1, "--reject")


def test_without_slurm(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"sbatch: it can't be started.*; --slurm needs Slurm's programs"):
        run(tmp_path, 1)


def test_a_controller_that_is_away_for_a_while_ends_no_trial(slurm, monkeypatch):
    """It says nothing of the job: that is not gone."""
    from megasched import slurm as client

    away = iter(range(8))
    real = client.state_and_status

    def asked(job):
        if next(away, None) is not None:
            raise client.NoAnswerError("squeue did not answer")
        return real(job)

    monkeypatch.setattr(client, "state_and_status", asked)
    (slurm / "states").write_text("RESIZING,END")
    assert run(slurm, 4).score == pytest.approx(4 / 0.014)
