"""Judges a trial by its run's output and exit status."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median
from typing import Literal

from megasched.launch.status.failure_log import FailureLog
from megasched.launch.status.training_log import TrainingLog

# ok: it has a score. oom: not enough memory. timeout: it took too long. refused: the flags were turned down before
# anything ran. crash: anything else.
Outcome = Literal["ok", "oom", "timeout", "refused", "crash"]

# Iterations that are not measured: kernels are chosen and memory is allocated in them.
WARM_UP = 3

SIGKILL = 9


@dataclass(frozen=True)
class Result:
    """Describes the result of one trial.

    Attributes:
        score: samples per second of the whole job; None if it has none.
        seconds: seconds of one iteration, the median of those measured.
        why: reason why the trial is not ok, in one line.
    """

    outcome: Outcome
    score: float | None = None
    seconds: float | None = None
    why: str = ""


@dataclass
class RunLog:
    """Reads a run's output line by line."""

    training: TrainingLog = field(default_factory=TrainingLog)
    failure: FailureLog = field(default_factory=FailureLog)

    def read(self, line: str) -> None:
        if self.training.read(line) is None:
            self.failure.read(line)

    def judge(self, status: int) -> Result:
        """Returns the result of the run, by its output and exit status (negative: ended by that signal)."""
        if status == 0:
            return self._measure()
        failure = self.failure
        if failure.out_of_memory:
            return Result("oom", why=failure.out_of_memory)
        if failure.refused:
            return Result("refused", why=failure.refused)
        if failure.killed or status == -SIGKILL:
            return Result("oom", why="killed by SIGKILL, as the kernel does when the host's memory is used up")
        return Result("crash", why=failure.exception or failure.aftermath or f"exit status {status}")

    def _measure(self) -> Result:
        steps = self.training.this_start  # by --max-restarts torchrun may have started them before
        if len(steps) <= WARM_UP:
            why = f"it ended after {len(steps)} iterations, of which the first {WARM_UP} are not measured"
            return Result("crash", why=why)
        measured = steps[WARM_UP:]
        seconds = median(step.seconds for step in measured)
        return Result("ok", median(step.samples / step.seconds for step in measured), seconds)
