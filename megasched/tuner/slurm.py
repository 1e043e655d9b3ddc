"""Trials as jobs of Slurm: ``sbatch`` with the flags as arguments of the batch script."""

from __future__ import annotations

import time
from typing import Any

from megasched import slurm
from megasched.errors import ConfigError
from megasched.tuner.outcome import Result
from megasched.tuner.runner import CommandRunner, read_run

REMEDY = "--slurm needs Slurm's programs"
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
        submitted = slurm.submit(["--parsable", "--output", str(path), *self.words(point)], remedy=REMEDY)
        if submitted.status:
            raise ConfigError(f"sbatch failed: {submitted.message}")
        job = slurm.job_id(submitted)
        try:
            state, status = self._wait(job)
        except BaseException:
            slurm.cancel(job)
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
            try:
                state, status = slurm.state_and_status(job)
                unseen = 0 if state else unseen + 1
            except slurm.NoAnswerError:  # nothing is known of the job then
                state, status = "", 0
            if unseen >= UNSEEN:
                return "", 0
            now = slurm.life(state)
            if now is slurm.Life.ENDED:
                return state, status
            if now is slurm.Life.RUNS:
                started = started or time.monotonic()
            if now is not slurm.Life.WAITS and started and time.monotonic() - started > self.timeout:
                slurm.cancel(job)
                return "TIMEOUT", 1
            time.sleep(self.poll_seconds)
