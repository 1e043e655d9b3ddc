"""What Megatron's trainer prints, read back as numbers (the lines of training/training.py's training_log)."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

ITERATION = re.compile(r" iteration\s+(?P<iteration>\d+)/\s*\d+ \|")
SECONDS = re.compile(r"elapsed time per iteration \(ms\): (?P<value>[0-9.]+) \|")
LOSS = re.compile(r" lm loss: (?P<value>[0-9.E+-]+) \|")
VALIDATION = re.compile(
    r"validation loss at iteration (?P<iteration>\d+)( on validation set)? \|"
    r" lm loss value: (?P<value>\S+) \|"
)


@dataclass(frozen=True)
class Iteration:
    """One logged line; with ``--log-interval 1`` one optimizer step.

    Attributes:
        iteration: counted from 1.
        loss: nats per token; NaN where Megatron prints none, which it does for a NaN.
        seconds: wall time of one iteration, without validation and checkpoints.
    """

    iteration: int
    loss: float
    seconds: float


@dataclass
class TrainingLog:
    """The numbers of one run, in the order printed.

    Attributes:
        printed: the lines as Megatron printed them.
        validation: iteration -> validation loss, nats per token.
    """

    printed: list[Iteration] = field(default_factory=list)
    validation: dict[int, float] = field(default_factory=dict)

    def read(self, line: str) -> Iteration | None:
        """Take in one line of output; returns the iteration, corrected, when it is an iteration's line."""
        if found := VALIDATION.search(line):
            self.validation[int(found["iteration"])] = float(found["value"])
        if not (found := ITERATION.search(line)) or not (seconds := SECONDS.search(line)):
            return None
        loss = LOSS.search(line)
        self.printed.append(
            Iteration(
                iteration=int(found["iteration"]),
                loss=float(loss["value"]) if loss else math.nan,
                seconds=float(seconds["value"]) / 1000.0,
            )
        )
        return self.iterations[-1]

    @property
    def iterations(self) -> list[Iteration]:
        """The lines with loss and time of the second one as they were, not as printed.

        Megatron prints the first iteration of a process without resetting its sums (is_first_iteration in
        training_log), so the second line is a mean that still has the first iteration in it.
        """
        if len(self.printed) < 2:
            return list(self.printed)
        first, second, *rest = self.printed
        fresh = second.iteration - first.iteration

        def without_first(mean: float, first_value: float) -> float:
            return (mean * (fresh + 1) - first_value) / fresh

        corrected = replace(
            second,
            loss=without_first(second.loss, first.loss),
            seconds=without_first(second.seconds, first.seconds),
        )
        return [first, corrected, *rest]


def read_log(lines: Iterable[str]) -> TrainingLog:
    """The numbers of a whole log, e.g. of an open file."""
    log = TrainingLog()
    for line in lines:
        log.read(line)
    return log
