"""Trials as processes of this machine."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megasched.errors import ConfigError
from megasched.launch.watched_run import SECONDS_TO_STOP
from megasched.reading.files import is_regular
from megasched.reading.log_lines import log_lines
from megasched.tuner.command_line import point_words, trial_words
from megasched.tuner.outcome import Result, RunLog
from megasched.tuner.space import Space

# A killed process is gone as soon as the kernel gets to it; its device memory with it.
SECONDS_TO_DIE = 3


class CommandRunner:
    """A command, and what each trial adds to it.

    Args:
        command: without what is tried.
        folder: holds a log of each trial.
        timeout: seconds of a trial.
        iterations: of the trainer in a trial.
    """

    def __init__(
        self, command: Sequence[str], space: Space, folder: Path, *, timeout: float, iterations: int
    ) -> None:
        self.command, self.space, self.folder = list(command), space, folder
        self.timeout, self.iterations = timeout, iterations

    def words(self, point: dict[str, Any]) -> list[str]:
        """The whole command line of a trial."""
        return [*self.command, *point_words(self.space, point), *trial_words(self.iterations)]

    def log(self, number: int) -> Path:
        self.folder.mkdir(parents=True, exist_ok=True)
        return self.folder / f"trial-{number}.log"

    def timed_out(self) -> Result:
        return Result("timeout", why=f"it was ended after {self.timeout:.0f} s")


class SubprocessRunner(CommandRunner):
    """Runs each trial as a child of this process, and leaves none of its processes behind."""

    def run(self, number: int, point: dict[str, Any]) -> Result:
        """
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
    """What a log says; of a file that is not there, nothing."""
    log = RunLog()
    if is_regular(path):
        for line in log_lines(path):
            log.read(line)
    return log


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a launcher and its ranks, which have sessions of their own under torchrun; nothing if it has ended."""
    import psutil

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
