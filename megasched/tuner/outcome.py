"""What came of a trial, and what a run's output and exit status say about it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

from megasched.launch.training_log import TrainingLog

# ok: it has a score. oom: not enough memory. timeout: it took too long. refused: the flags were turned down before
# anything ran. crash: anything else.
Outcome = Literal["ok", "oom", "timeout", "refused", "crash"]

# Iterations that are not measured: kernels are chosen and memory is allocated in them.
WARM_UP = 3

SAMPLES = re.compile(r"global batch size:\s+(\d+) \|")
OUT_OF_MEMORY = re.compile(
    r"out of memory|OutOfMemoryError|not enough memory|Cannot allocate memory|ALLOC_FAILED|bad_alloc|oom[-_]?kill",
    re.IGNORECASE,
)
# torchrun's words on a rank that was killed; the kernel does so on a host without memory.
KILLED = re.compile(r"exitcode\s*: -9|Signal 9 \(SIGKILL\)")
REFUSED = re.compile(r"^megasched: error(?: on rank \d+)?: (?P<why>.*)|: error: (?P<usage>.*)")
VALIDATED = re.compile(r"in validate_args$")
EXCEPTION = re.compile(r"^(?:\[rank\d+\]:\s*)?(?P<what>[A-Za-z_][\w.]*(?:Error|Exception|Interrupt)\b.*)")
RANK = re.compile(r"^\[(?:default|rank)\d+\]:\s?")
SIGKILL = 9


@dataclass(frozen=True)
class Result:
    """What came of one trial.

    Attributes:
        score: samples per second of the whole job; None if it has none.
        seconds: of one iteration, the median of those measured.
        why: of a trial that is not ok, in one line.
    """

    outcome: Outcome
    score: float | None = None
    seconds: float | None = None
    why: str = ""


@dataclass
class RunLog:
    """A run's output, taken in line by line.

    Attributes:
        samples: of each iteration, by Megatron's log.
    """

    training: TrainingLog = field(default_factory=TrainingLog)
    samples: list[int] = field(default_factory=list)
    out_of_memory: str = ""
    killed: bool = False
    refused: str = ""
    exception: str = ""
    _validating: bool = False

    def read(self, line: str) -> None:
        line = RANK.sub("", line.rstrip("\n"))
        if self.training.read(line) is not None:
            found = SAMPLES.search(line)
            self.samples.append(int(found[1]) if found else 0)
            return
        if OUT_OF_MEMORY.search(line):
            self.out_of_memory = self.out_of_memory or line.strip()
        if KILLED.search(line):
            self.killed = True
        if (found := REFUSED.search(line)) and not self.refused:
            self.refused = found["why"] or found["usage"]
        elif self.refused and self.refused.endswith(":") and line.startswith("  - "):
            self.refused += line[3:]  # the first of a list of reasons
        if VALIDATED.search(line):
            self._validating = True
        if found := EXCEPTION.search(line):
            self.exception = self.exception or found["what"]
            if self._validating and not self.refused:
                self.refused = found["what"]

    def judge(self, status: int) -> Result:
        """What came of the run, by its output and exit status (negative: ended by that signal)."""
        if status == 0:
            return self._measure()
        if self.out_of_memory:
            return Result("oom", why=self.out_of_memory)
        if self.refused:
            return Result("refused", why=self.refused)
        if self.killed or status == -SIGKILL:
            return Result("oom", why="killed by SIGKILL, as the kernel does when the host's memory is used up")
        return Result("crash", why=self.exception or f"exit status {status}")

    def _measure(self) -> Result:
        steps = self.training.iterations
        if len(steps) <= WARM_UP:
            why = f"it ended after {len(steps)} iterations, of which the first {WARM_UP} are not measured"
            return Result("crash", why=why)
        pairs = [(step.seconds, count) for step, count in zip(steps, self.samples, strict=True)][WARM_UP:]
        seconds = median(each for each, _ in pairs)
        return Result("ok", median(count / each for each, count in pairs), seconds)
