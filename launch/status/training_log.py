"""Reads back the numbers that Megatron's trainer prints (the lines of training/training.py's training_log)."""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from typing import NamedTuple

# Of more digits nothing is counted: they are two lines that were written into one.
WHOLE = r"[0-9]{1,15}"
MOST = 1e15  # of seconds, FLOP/s and losses; sums of more overflow
TIME = r"[0-9]{4}-[0-9]{2}-[0-9]{2} [0-9]{2}:[0-9]{2}:[0-9]{2}(?:\.[0-9]{1,6})?"
ITERATION = re.compile(
    rf"\[(?P<time>{TIME})\] iteration\s+(?P<iteration>{WHOLE})/\s*(?P<last>{WHOLE}) \|(?P<fields>.*)"
)
VALIDATION = re.compile(
    rf"validation loss at iteration (?P<iteration>{WHOLE})( on validation set)? \|"
    r" [\w ]*loss value: (?P<value>\S+) \|"
)
SAVED = re.compile(
    rf"\[(?P<time>{TIME})\] (?P<what>saving|successfully saved)( local)? checkpoint (?:at|from) iteration\s+"
    rf"(?P<iteration>{WHOLE})(?: to (?P<where>.*?))?(?: \[ t .*| in \w+ format)?$"
)
MILESTONE = re.compile(rf"\[(?P<what>[^\]]+)\] datetime: (?P<time>{TIME})")
RANK_TIMES = re.compile(
    rf"\[(?P<time>{TIME})\] \| MnRtt/Rnk: (?P<least>[\d.]+)ms/(?P<fastest>{WHOLE})"
    rf" \| MxRtt/Rnk: (?P<most>[\d.]+)ms/(?P<slowest>{WHOLE}) \|"
)
# Ranks that share a pipe may write between another's message and its line end: one line has both then.
MESSAGE = re.compile(rf"(?=\[{TIME}\] )|(?=\[[^\[\]]+\] datetime: )|(?=validation loss at iteration )")
ARGUMENT = re.compile(r"  (?P<name>seq_length|world_size) \.+ (?P<value>[0-9]{1,15})$")

# What is trained on, by the names that Megatron's scripts print; routers and heads have losses too.
LOSSES = ("lm loss", "loss")
START = "before the start of training step"
DONE = "after training is done"
EXIT = "exiting program"

# Each line that is read here has one of these in it; what has none need not be looked at.
MARKS = (
    b"elapsed time per iteration (ms)", b"validation loss at ", b" checkpoint ", b"] datetime: ", b" .......",
    b"] | MnRtt/Rnk: ",
)  # fmt: skip

# A log of a run has one of these from its first lines on: of megasched, of Megatron's, of its trainer.
SIGNS = (b"megasched", b"megatron", b"Megatron", b"elapsed time per iteration (ms)", b"] datetime: ")


class Iteration(NamedTuple):
    """Represents one logged line (with ``--log-interval 1`` one step), as a tuple, since a log may have a million.

    Attributes:
        iteration: number of the iteration, counted from 1.
        loss: nats per token; NaN where Megatron prints none, which it does for a NaN.
        seconds: wall time of one iteration, without validation and checkpoints.
        last: number of the iteration that ends the run.
        time: by the clock of the machine that printed it, in its time zone.
        samples: number of samples in a global batch.
        grad_norm: gradient norm; None where none is printed.
        tflops: TFLOP/s of one GPU; None without ``--log-throughput``.
        skipped, nan: number of iterations since the line before that were skipped, or whose loss was no number.
    """

    iteration: int
    loss: float
    seconds: float
    last: int = 0
    time: datetime = datetime.min
    samples: int = 0
    grad_norm: float | None = None
    tflops: float | None = None
    skipped: int = 0
    nan: int = 0


class Checkpoint(NamedTuple):
    """Represents a checkpoint that was written, or was being written, at a time."""

    iteration: int
    time: datetime
    where: str


class RankTimes(NamedTuple):
    """Holds how long the forwards of one iteration take, on the slowest and on the fastest rank.

    The times are means over the iterations since the line before (``--log-straggler``).

    Attributes:
        slowest, fastest: numbers of the ranks.
    """

    time: datetime
    slowest: int
    slowest_seconds: float
    fastest: int
    fastest_seconds: float


class Milestone(NamedTuple):
    """Represents the end of training: ``after training is done``, or ``exiting program ...`` with the reason."""

    time: datetime
    what: str


@dataclass
class TrainingLog:
    """Holds the numbers of one run, in the order in which they were printed.

    Attributes:
        printed: the iterations as Megatron printed them.
        validation: iteration -> validation loss, nats per token.
        starts: times at which training began, one for each start of the processes.
        saving: checkpoints that were begun.
        saved: checkpoints that are complete.
        ends: how training ended, each time.
        rank_times: times of the slowest and the fastest rank.
        arguments: those of Megatron's arguments that `ARGUMENT` names, as last printed.
    """

    printed: list[Iteration] = field(default_factory=list)
    validation: dict[int, float] = field(default_factory=dict)
    starts: list[datetime] = field(default_factory=list)
    saving: list[Checkpoint] = field(default_factory=list)
    saved: list[Checkpoint] = field(default_factory=list)
    ends: list[Milestone] = field(default_factory=list)
    rank_times: list[RankTimes] = field(default_factory=list)
    arguments: dict[str, int] = field(default_factory=dict)
    _first: int = 0  # of the lines of the processes that print now

    def read(self, line: str) -> Iteration | None:
        """Reads one line of output; returns the iteration, corrected, if the line has one, otherwise None."""
        found = [self._read_message(message) for message in MESSAGE.split(line)]
        return next((step for step in reversed(found) if step), None)

    def _read_message(self, line: str) -> Iteration | None:
        try:
            return self._take_message(line)
        except ValueError:  # a number or a date that is none: another rank has written into the line
            return None

    def _take_message(self, line: str) -> Iteration | None:
        if step := _iteration(line):
            return self._take(step)
        if found := VALIDATION.search(line):
            self.validation[int(found["iteration"])] = _loss(found["value"])
        elif found := SAVED.search(line.rstrip()):
            into = self.saving if found["what"] == "saving" else self.saved
            into.append(Checkpoint(int(found["iteration"]), _time(found["time"]), found["where"] or ""))
        elif found := MILESTONE.search(line):
            if found["what"] == START:
                self.starts.append(_time(found["time"]))
            elif found["what"] == DONE or found["what"].startswith(EXIT):
                self.ends.append(Milestone(_time(found["time"]), found["what"]))
        elif found := RANK_TIMES.search(line):
            slowest, fastest = int(found["slowest"]), int(found["fastest"])
            most, least = _seconds(found["most"]), _seconds(found["least"])
            self.rank_times.append(RankTimes(_time(found["time"]), slowest, most, fastest, least))
        elif found := ARGUMENT.search(line.rstrip()):
            self.arguments[found["name"]] = int(found["value"])
        return None

    def _take(self, step: Iteration) -> Iteration:
        self.printed.append(step)
        if len(self.printed) > 1 and _begins(self.printed[-2], step, self.starts):
            self._first = len(self.printed) - 1
        second = len(self.printed) == self._first + 2
        return _without_first(self.printed[self._first], step) if second else step

    @property
    def iterations(self) -> list[Iteration]:
        """Returns the iterations that count; the second line of each process is corrected to be without its first.

        Processes that go on from a checkpoint make iterations again: of those the newest count.
        """
        found: list[Iteration] = []
        first = 0
        for index, step in enumerate(self.printed):
            if index and _begins(self.printed[index - 1], step, self.starts):
                first = index
                while found and found[-1].iteration >= step.iteration:
                    found.pop()
            found.append(_without_first(self.printed[first], step) if index == first + 1 else step)
        return found

    @property
    def this_start(self) -> list[Iteration]:
        """Returns those of `iterations` that belong to the processes that were started last."""
        if self.starts and self.printed and max(self.starts) > self.printed[-1].time:
            return []
        found = self.iterations
        first = next(
            (i for i in range(len(self.printed) - 1, 0, -1) if _begins(*self.printed[i - 1 : i + 1], self.starts)),
            0,
        )
        return found[len(found) - (len(self.printed) - first) :]


def merge(logs: Iterable[TrainingLog]) -> TrainingLog:
    """Merges the logs of several nodes, or of one run's several starts, into one.

    Args:
        logs: the oldest first, because the last one's arguments and validation count. Everything else has a time.
    """
    merged = TrainingLog()
    for log in logs:
        merged.printed += log.printed
        merged.starts += log.starts
        merged.saving += log.saving
        merged.saved += log.saved
        merged.ends += log.ends
        merged.rank_times += log.rank_times
        merged.validation |= log.validation
        merged.arguments |= log.arguments
    merged.printed.sort(key=lambda step: step.time)
    merged.starts.sort()
    for checkpoints in (merged.saving, merged.saved):
        checkpoints.sort(key=lambda checkpoint: checkpoint.time)
    merged.ends.sort()
    merged.rank_times.sort()
    return merged


def _iteration(line: str) -> Iteration | None:
    """Returns the iteration of a line; None for any other line, and for one that another rank wrote into."""
    found = ITERATION.search(line)
    if not found:
        return None
    time, iteration, last, told = found.groups()
    try:
        fields = dict(part.rsplit(": ", 1) for part in told.strip(" |\r\n").split(" | "))
        name = next((name for name in LOSSES if name in fields), None)
        skipped = _count(fields.get("number of skipped iterations", "0"))
        loss = _loss(fields[name]) if name else math.nan
        grad_norm, tflops = fields.get("grad norm"), fields.get("throughput per GPU (TFLOP/s/GPU)")
        return Iteration(
            int(iteration),
            # Where all iterations were skipped, the mean of none is printed as 0.
            loss if loss or not skipped else math.nan,
            _seconds(fields["elapsed time per iteration (ms)"]),
            int(last),
            _time(time),
            _count(fields.get("global batch size", "0")),
            None if grad_norm is None else float(grad_norm),
            None if tflops is None else _amount(tflops),
            skipped,
            _count(fields.get("number of nan iterations", "0")),
        )
    except (KeyError, ValueError):
        return None


def _time(text: str) -> datetime:
    """Returns a time; raises ValueError for a year in which nobody trains, as differences would be endless."""
    found = datetime.fromisoformat(text)
    if not 2000 <= found.year < 2200:
        raise ValueError(text)
    return found


def _count(text: str) -> int:
    if not re.fullmatch(WHOLE, text.strip()):
        raise ValueError(text)
    return int(text)


def _amount(text: str) -> float:
    found = float(text)
    if not 0 <= found < MOST:  # NaN is neither
        raise ValueError(text)
    return found


def _seconds(milliseconds: str) -> float:
    return _amount(milliseconds) / 1000.0


def _loss(text: str) -> float:
    found = float(text)
    return found if not abs(found) >= MOST else math.copysign(math.inf, found)


def _begins(before: Iteration, step: Iteration, starts: list[datetime]) -> bool:
    """Returns whether a start of processes lies between two lines: it was printed, or an iteration is repeated."""
    if step.iteration <= before.iteration:
        return True
    return bool(starts) and bisect_right(starts, before.time) < bisect_right(starts, step.time)


def _without_first(first: Iteration, second: Iteration) -> Iteration:
    """Returns the second line of a process without the share of its first iteration.

    Megatron prints the first iteration of a process without resetting its sums (is_first_iteration in
    training_log), so the second line is a mean that still has the first iteration in it.
    """
    fresh = second.iteration - first.iteration
    # Skipped iterations have no part in the mean of the losses.
    advanced, before = fresh + 1 - second.skipped, 1 - first.skipped
    of_first = first.loss if before else 0.0
    return second._replace(
        loss=(second.loss * advanced - of_first) / (advanced - before) if advanced > before else math.nan,
        seconds=(second.seconds * (fresh + 1) - first.seconds) / fresh,
        skipped=second.skipped - first.skipped,
        nan=second.nan - first.nan,
    )
