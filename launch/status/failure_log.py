"""Finds in a run's output why it failed: no memory, refused flags, an exception, or a job that was ended."""

from __future__ import annotations

import re
from dataclasses import dataclass

# What is before a rank's own words: srun --label's task, and the rank by torchrun or PyTorch.
LABEL = re.compile(r"^(?:\s*\d+: )?(?:\[(?:default|rank)\d+\]:\s?)*")
OUT_OF_MEMORY = re.compile(
    r"out of memory|OutOfMemoryError|not enough memory|Cannot allocate memory|ALLOC_FAILED|bad_alloc|oom[-_]?kill",
    re.IGNORECASE,
)
# torchrun's words on a rank that was killed; the kernel does so on a host without memory.
KILLED = re.compile(r"exitcode\s*: -9|Signal 9 \(SIGKILL\)")
REFUSED = re.compile(r"^megasched: error(?: on rank \d+)?: (?P<why>.*)|: error: (?P<usage>.*)")
VALIDATED = re.compile(r"in validate_args$")
EXCEPTION = re.compile(r"^(?P<what>[A-Za-z_][\w.]*(?:Error|Exception|Interrupt)\b.*)")
# What ranks and launchers raise when another rank has failed already.
AFTERMATH = re.compile(
    r"ChildFailedError|SignalException|DistBackendError|DistNetworkError|Rendezvous\w*Error|KeyboardInterrupt"
    r"|[Cc]onnection (?:closed|reset)"
)
SLURM = re.compile(r"^(?:srun|slurmstepd|slurmd|sbatch)(?:-\S+)?: error: (?P<what>.*)")
# Of Slurm's errors many harm nobody; a task that has ended badly does.
TASK_ENDED = re.compile(r"\btasks? [\d,-]+: ")
# A step is cancelled when one of its tasks fails; a job, when somebody or something ends it.
CANCELLED = re.compile(r"\*\*\* (?P<what>JOB \d+ .*CANCELLED AT .*?) \*\*\*")
# What the launchers write when Ctrl-C or SIGTERM has ended them, and with them the run.
ENDED_BY = "megasched: ended by "

# Each line that is read here has one of these in it; what has none need not be looked at.
MARKS = (
    b"rror", b"xception", b"Interrupt", b"emory", b"ALLOC_FAILED", b"bad_alloc", b"oom", b"OOM", b"xitcode",
    b"Signal 9", b"validate_args", b"  - ", ENDED_BY.encode(),
)  # fmt: skip


@dataclass
class FailureLog:
    """Collects the failures in a run's output, line by line; of each kind it keeps the first.

    Attributes:
        out_of_memory: the line that says so.
        killed: whether a rank was ended by SIGKILL.
        refused: why flags were refused before anything ran.
        exception: an exception with its message.
        aftermath: an exception that follows from another rank's failure.
        cancelled: who or what ended the job.
        task_ended: srun's words on a task that ended badly.
    """

    out_of_memory: str = ""
    killed: bool = False
    refused: str = ""
    exception: str = ""
    aftermath: str = ""
    cancelled: str = ""
    task_ended: str = ""
    _validating: bool = False

    def read(self, line: str) -> None:
        """Reads one line."""
        line = LABEL.sub("", line.rstrip("\n"))
        if line.startswith(ENDED_BY):
            self.cancelled = line.removeprefix("megasched: ")
        if OUT_OF_MEMORY.search(line):
            self.out_of_memory = self.out_of_memory or line.strip()
        if KILLED.search(line):
            self.killed = True
        if found := SLURM.search(line):
            if TASK_ENDED.search(line):
                self.task_ended = self.task_ended or found["what"]
            if cancelled := CANCELLED.search(line):
                self.cancelled = self.cancelled or cancelled["what"]
        elif (found := REFUSED.search(line)) and not self.refused:
            self.refused = found["why"] or found["usage"]
        elif self.refused and self.refused.endswith(":") and line.startswith("  - "):
            self.refused += line[3:]  # the first of a list of reasons
        if VALIDATED.search(line):
            self._validating = True
        if found := EXCEPTION.search(line):
            if AFTERMATH.search(line):
                self.aftermath = self.aftermath or found["what"]
            else:
                self.exception = self.exception or found["what"]
            if self._validating and not self.refused:
                self.refused = found["what"]

    @property
    def reasons(self) -> tuple[str, ...]:
        """Returns a text for each kind of failure, what explains most first; empty for a kind that is absent."""
        killed = "a rank was ended by SIGKILL, as the kernel does when the host's memory is used up"
        return (
            self.cancelled,
            self.out_of_memory,
            self.refused,
            self.exception,
            killed if self.killed else "",
            self.aftermath,
            self.task_ended,
        )
