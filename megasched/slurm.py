"""Calls Slurm's programs with time limits, and sorts its words for a job's state.

No other module calls them or sorts states.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from megasched.errors import ConfigError

# It waits for nodes, or will be started again.
WAITING = {
    "PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT",
    "SUSPENDED",
}  # fmt: skip
# It holds nodes.
RUNNING = {"RUNNING", "COMPLETING", "RESIZING", "SIGNALING", "STAGE_OUT", "STOPPED"}
# Of those, its processes are being ended, or have ended.
ENDING = {"COMPLETING", "STAGE_OUT"}
FAILED = {"FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "LAUNCH_FAILED", "RECONFIG_FAIL"}
COMPLETED = "COMPLETED"

# Questions are answered in milliseconds, or the controller is not there; a submission may wait for its plugins.
SECONDS_TO_ANSWER = 20
SECONDS_TO_SUBMIT = 60
_NOT_REACHED = ("Unable to contact slurm controller", "Connection refused", "timed out", "Socket timed out")


class NoAnswerError(ConfigError):
    """Reports that one of Slurm's programs is installed but does not reach Slurm in time."""


class Ended(NamedTuple):
    """Holds the output and the exit status of a program that has ended."""

    out: str
    err: str
    status: int

    @property
    def message(self) -> str:
        """Returns the program's errors in one line, or its exit status if it printed none."""
        lines = [line.removeprefix("sbatch: ").removeprefix("error: ") for line in self.err.splitlines() if line]
        return "; ".join(lines) or f"status {self.status}"


def call(words: Sequence[str], *, seconds: float = SECONDS_TO_ANSWER, remedy: str = "") -> Ended:
    """Runs one of Slurm's programs to its end.

    Args:
        words: its name and arguments.
        remedy: text that the error adds when the program can't be started.

    Raises:
        ConfigError: it can't be started.
        NoAnswerError: it does not end in time, or does not reach Slurm, or its connection breaks.
    """
    try:
        found = subprocess.run(
            words,
            env={**os.environ, "SLURM_TIME_FORMAT": "standard"},  # which people set to what they like to read
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=seconds,
        )
    except OSError as error:
        more = f"; {remedy}" if remedy else ""
        raise ConfigError(f"{words[0]}: it can't be started ({error.strerror}){more}") from error
    except subprocess.TimeoutExpired as error:
        raise NoAnswerError(f"{words[0]} did not answer within {seconds:g} s: is slurmctld up?") from error
    ended = Ended(found.stdout, found.stderr, found.returncode)
    if found.returncode == -signal.SIGPIPE:  # of which they die without a word
        raise NoAnswerError(f"{words[0]}: its connection to Slurm broke: is slurmctld up?")
    if found.returncode and any(line in found.stderr for line in _NOT_REACHED):
        raise NoAnswerError(f"{words[0]} does not reach Slurm: {ended.message}")
    return ended


def submit(arguments: Sequence[str], *, remedy: str = "") -> Ended:
    """Runs ``sbatch``; see ``call``."""
    return call(["sbatch", *arguments], seconds=SECONDS_TO_SUBMIT, remedy=remedy)


def job_id(submitted: Ended) -> str:
    """Returns the job id in the output of ``sbatch --parsable``, which is ``ID`` or ``ID;CLUSTER``."""
    return submitted.out.partition(";")[0].strip()


def cancel(job: str) -> str:
    """Cancels a job with ``scancel`` and returns why that failed; empty if it worked."""
    try:
        ended = call(["scancel", job])
    except ConfigError as error:
        return str(error)
    return ended.message if ended.status else ""


def queue_state(job: str) -> str:
    """Returns a job's state in the queue; empty for a job that is not in it (any more).

    Raises:
        ConfigError, NoAnswerError: as ``call``.
    """
    ended = call(["squeue", "--jobs", job, "--noheader", "--format", "%T"])
    return "" if ended.status else ended.out.strip()


def state_and_status(job: str) -> tuple[str, int]:
    """Returns a job's state and exit status, which is negative for a signal.

    Both are from the accounting; where that knows nothing, the state is the queue's and the status 0. The state is
    empty if neither has one.

    Raises:
        NoAnswerError: Slurm can't be reached now.
    """
    fields = ["--allocations", "--noheader", "--parsable2", "--format", "State,ExitCode"]
    try:
        told = call(["sacct", "--jobs", job, *fields])
        out = "" if told.status else told.out.strip()
    except ConfigError:  # a cluster without accounting may not have it, and the database may be away by itself
        out = ""
    if out:
        state, _, code = out.splitlines()[0].partition("|")
        status, _, signal = code.partition(":")
        return state.split()[0], -int(signal) if int(signal or 0) else int(status or 0)
    return queue_state(job), 0


class Life(Enum):
    """Classifies a job's state by what it means to a process that waits for the job."""

    WAITS = "waits"
    RUNS = "runs"
    ENDED = "ended"
    UNKNOWN = "unknown"


def life(state: str) -> Life:
    """Returns what a job's state means to a process that waits for the job.

    Args:
        state: Slurm's word; empty where Slurm gives none.
    """
    if not state:
        return Life.UNKNOWN
    if state in WAITING:
        return Life.WAITS
    return Life.RUNS if state in RUNNING else Life.ENDED


def has_processes(job: str) -> bool:
    """Returns whether a job is known to have processes that go on; False where Slurm does not say."""
    try:
        state = queue_state(job)
    except ConfigError:
        return False
    return life(state) is Life.RUNS and state not in ENDING
