"""Trials as jobs of Slurm: ``sbatch`` with the flags as arguments of the batch script."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Sequence
from typing import Any

from megasched.errors import ConfigError
from megasched.tuner.outcome import Result
from megasched.tuner.runner import CommandRunner, read_run

WAITING = {"PENDING", "CONFIGURING", "REQUEUED", "RESIZING", "SUSPENDED", "REQUEUE_HOLD", "SPECIAL_EXIT"}
RUNNING = {"RUNNING", "COMPLETING", "STAGE_OUT", "SIGNALING"}
POLL_SECONDS = 5.0
# A job may be in neither list for a moment: that often in a row, and it is gone.
UNSEEN = 3


class SlurmRunner(CommandRunner):
    """Submits each trial and waits for it; ``command`` is what follows ``sbatch``: options and the script.

    The script hands its arguments on: ``srun torchrun ... pretrain_gpt.py <flags> "$@"``. Time in the queue does
    not count.
    """

    poll_seconds = POLL_SECONDS

    def run(self, number: int, point: dict[str, Any]) -> Result:
        """
        Raises:
            ConfigError: Slurm's programs are missing, or the job is not accepted.
        """
        path = self.log(number).resolve()
        path.unlink(missing_ok=True)
        job = _call(["sbatch", "--parsable", "--output", str(path), *self.words(point)]).partition(";")[0].strip()
        try:
            state, status = self._wait(job)
        except BaseException:
            _call(["scancel", job])
            raise
        if state == "TIMEOUT":
            return self.timed_out()
        log = read_run(path)
        if state == "OUT_OF_MEMORY":
            return Result(
                "oom", why=log.failure.out_of_memory or "Slurm: OUT_OF_MEMORY, the host's memory is used up"
            )
        if not state:  # its exit status is not known
            found = log.judge(0)
            return found if found.outcome == "ok" else log.judge(1)
        if state in ("COMPLETED", "FAILED"):
            return log.judge(status)
        return Result("crash", why=f"Slurm: {state}")

    def _wait(self, job: str) -> tuple[str, int]:
        """State and exit status (negative: a signal) of a job that has ended; no state where Slurm tells none."""
        started, unseen = None, 0
        while True:
            state, status = _state(job)
            unseen = 0 if state else unseen + 1
            if unseen >= UNSEEN:
                return "", 0
            if state in RUNNING:
                started = started or time.monotonic()
                if time.monotonic() - started > self.timeout:
                    _call(["scancel", job])
                    return "TIMEOUT", 1
            elif state and state not in WAITING:
                return state, status
            time.sleep(self.poll_seconds)


def _state(job: str) -> tuple[str, int]:
    """By the accounting, or by the queue where that knows nothing; no state if neither does."""
    told = _call(
        ["sacct", "--jobs", job, "--allocations", "--noheader", "--parsable2", "--format", "State,ExitCode"],
        quiet=True,
    ).strip()
    if told:
        state, _, code = told.splitlines()[0].partition("|")
        status, _, signal = code.partition(":")
        return state.split()[0], -int(signal) if int(signal or 0) else int(status or 0)
    return _call(["squeue", "--jobs", job, "--noheader", "--format", "%T"], quiet=True).strip(), 0


def _call(words: Sequence[str], *, quiet: bool = False) -> str:
    """What a program of Slurm's prints.

    Args:
        quiet: nothing if it fails, or is missing.
    """
    try:
        found = subprocess.run(words, capture_output=True, text=True, check=False)
    except OSError as error:
        if quiet:
            return ""
        raise ConfigError(
            f"{words[0]}: it can't be started: {error.strerror}; --slurm needs Slurm's programs"
        ) from error
    if found.returncode and not quiet:
        raise ConfigError(f"{words[0]} failed: {found.stderr.strip() or found.returncode}")
    return found.stdout if not found.returncode else ""
