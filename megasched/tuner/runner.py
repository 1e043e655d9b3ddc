"""Makes the command lines of trials, and runs them as processes of this machine or as jobs of Slurm."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from megasched import slurm
from megasched.errors import ConfigError
from megasched.launch.watched_run import SECONDS_TO_STOP
from megasched.reading.files import is_regular
from megasched.reading.log_lines import log_lines
from megasched.tuner.expression import Assignment
from megasched.tuner.outcome import Result, RunLog
from megasched.tuner.space import Space

# A killed process is gone as soon as the kernel gets to it; its device memory with it.
SECONDS_TO_DIE = 3
NEEDS_SLURM = "--slurm needs Slurm's programs"
POLL_SECONDS = 5.0
# A job may be in neither list for a moment: that often in a row, and it is gone.
UNSEEN = 3


def point_words(space: Space, point: Assignment) -> list[str]:
    """Returns the flags and schedule options of a point, to be put behind the command.

    Raises:
        ConfigError: a symbol's function returns no list of words.
    """
    words: list[str] = []
    options: list[str] = []
    for name, value in point.items():
        symbol = space.symbols[name]
        if symbol.schedule:
            options.append(f"{name}={value if isinstance(value, str) else json.dumps(value)}")
        elif callable(symbol.flag):
            found = symbol.flag(value)
            if isinstance(found, str) or not isinstance(found, Sequence):
                raise ConfigError(
                    f"{name}: the function of flag= returns a list of words; for {value!r}: {found!r}"
                )
            words += map(str, found)
        elif value is True:
            words.append(symbol.flag)
        elif value is not None and value is not False:
            words += [symbol.flag, str(value)]
    return [*words, "--schedule-option", *options] if options else words


def trial_words(iterations: int) -> list[str]:
    """Returns the flags that make a run a trial: it ends after a few iterations, each of which is logged."""
    return ["--exit-interval", str(iterations), "--log-interval", "1"]


def check_command(space: Space, command: Sequence[str]) -> None:
    """Refuses a command that can't be tried.

    Raises:
        ConfigError: there is none, it saves checkpoints, or it has a flag that is tried as well.
    """
    if not command:
        raise ConfigError(
            "there is no command to try; write it after `--`: megasched tune SPACE.py -- torchrun "
            "--nproc-per-node 8 -m megasched pretrain_gpt.py <flags>"
        )
    given = {word.partition("=")[0] for word in command}
    if "--save" in given:
        raise ConfigError(
            "--save: trials end after a few iterations, and must not leave checkpoints; leave it out"
        )
    for symbol in space.symbols.values():
        if symbol.flag in given and not symbol.schedule:
            raise ConfigError(
                f"{symbol.flag} is in the command, and the space tries it as {symbol.name}; leave it out of one"
            )


class CommandRunner:
    """Makes the command line of each trial from a command.

    Args:
        command: command line without the flags that are tried.
        folder: holds a log of each trial.
        timeout: seconds of a trial.
        iterations: iterations of the trainer in a trial.
    """

    def __init__(
        self, command: Sequence[str], space: Space, folder: Path, *, timeout: float, iterations: int
    ) -> None:
        self.command, self.space, self.folder = list(command), space, folder
        self.timeout, self.iterations = timeout, iterations

    def words(self, point: dict[str, Any]) -> list[str]:
        """Returns the whole command line of a trial."""
        return [*self.command, *point_words(self.space, point), *trial_words(self.iterations)]

    def log(self, number: int) -> Path:
        self.folder.mkdir(parents=True, exist_ok=True)
        return self.folder / f"trial-{number}.log"

    def timed_out(self) -> Result:
        return Result("timeout", why=f"it was ended after {self.timeout:.0f} s")


class SubprocessRunner(CommandRunner):
    """Runs each trial as a child of this process, and leaves none of its processes behind."""

    def run(self, number: int, point: dict[str, Any]) -> Result:
        """Runs a trial to its end and returns its result.

        Raises:
            ConfigError: there is no such program.
        """
        path = self.log(number)
        with path.open("w") as log:
            try:
                # A session of its own: Ctrl-C reaches this process only, which then ends the launcher.
                process = subprocess.Popen(
                    self.words(point), stdout=log, stderr=subprocess.STDOUT, start_new_session=True
                )
            except OSError as error:
                raise ConfigError(f"{self.command[0]}: it can't be started: {error.strerror}") from error
            try:
                status = process.wait(self.timeout)
            except subprocess.TimeoutExpired:
                return self.timed_out()
            finally:
                _end(process)
        return read_run(path).judge(status)


def read_run(path: Path) -> RunLog:
    """Reads the log of a run; the result is empty if there is no such file."""
    log = RunLog()
    if is_regular(path):
        for line in log_lines(path):
            log.read(line)
    return log


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a launcher and its ranks, which have sessions of their own under torchrun; nothing if it has ended."""
    if process.poll() is not None:
        return
    ranks = psutil.Process(process.pid).children(recursive=True)
    process.terminate()
    try:
        process.wait(SECONDS_TO_STOP)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for rank in ranks:
        if rank.is_running():
            rank.kill()
    psutil.wait_procs(ranks, timeout=SECONDS_TO_DIE)


class SlurmRunner(CommandRunner):
    """Submits each trial and waits for it; ``command`` is what follows ``sbatch``: options and the script.

    The script hands its arguments on: ``srun torchrun ... pretrain_gpt.py <flags> "$@"``. Time in the queue does
    not count.
    """

    poll_seconds = POLL_SECONDS

    def run(self, number: int, point: dict[str, Any]) -> Result:
        """Runs a trial to its end and returns its result.

        Raises:
            ConfigError: Slurm's programs are missing, or the job is not accepted.
        """
        path = self.log(number).resolve()
        path.unlink(missing_ok=True)
        submitted = slurm.submit(["--parsable", "--output", str(path), *self.words(point)], remedy=NEEDS_SLURM)
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
        """Returns state and exit status (negative: a signal) of a job that ended; no state if Slurm has none."""
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
