"""Judges by its logs and by Slurm whether a run trains, hangs, has failed or is over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Literal, NamedTuple

from megasched.launch.run_folder import RunLogs
from megasched.launch.slurm.client import SlurmJob
from megasched.launch.status.growing_log import GrowingLog
from megasched.launch.status.training_log import DONE, Iteration, TrainingLog
from megasched.slurm import COMPLETED, FAILED, RUNNING, WAITING

# waiting: Slurm has not started it. starting: no iteration yet since its last start. hung: no line for too long.
# stopped: it ended as asked before its last iteration, or was ended. finished: all iterations are made.
State = Literal["waiting", "starting", "training", "hung", "stopped", "failed", "finished"]
ENDED = {"stopped", "failed", "finished"}

# A run is called hung when no line of an iteration has come for so many times the usual pause between two, ...
USUAL_PAUSES = 5
# ... by the newest ones of them, ...
RECENT_PAUSES = 20
# ... for so many times the longest pause since it was started (a checkpoint, a validation), ...
LONGEST_PAUSES = 2
# ... and for so long at least: checkpoints and validations that have not come yet take their time.
SHORTEST_STALL = timedelta(minutes=5)
# At its start a run loads, builds indices and compiles, and prints little.
START_STALL = timedelta(minutes=30)

# Of two lines of one moment in two logs, either may be the later by so many seconds.
SAME_MOMENT = 5.0


class Failure(NamedTuple):
    """Describes what went wrong; all fields are empty when nothing did.

    Attributes:
        what: the failure, in one line.
        log: the log that says so.
        cancelled: whether somebody or something ended the job.
        certain: whether a rank has ended, so that the others can't go on.
    """

    what: str = ""
    log: Path | None = None
    cancelled: bool = False
    certain: bool = False


def find_failure(logs: RunLogs, read: Mapping[Path, GrowingLog], newest: Iteration | None) -> Failure:
    """Returns what best explains why the newest attempt failed; a failure that an iteration followed is forgotten.

    Args:
        logs: logs of the run.
        read: content of each log, by path.
        newest: newest iteration of the whole run.
    """
    nodes = [read[path] for path in logs.attempts[-1].logs]
    last_line = max(log.modified for log in nodes)
    # What a batch script printed about earlier attempts stays in its log.
    batch = [read[path] for path in logs.batch_logs if read[path].modified > last_line - SAME_MOMENT]
    went_on = newest.time.timestamp() - SAME_MOMENT if newest else 0.0
    standing = [log for log in nodes + batch if log.modified >= went_on]
    certain = any(log.failure.killed or log.failure.task_ended for log in standing)
    told = [
        (rank, Failure(reason, log.path, reason == log.failure.cancelled, certain))
        for log in standing
        for rank, reason in enumerate(log.failure.reasons)
        if reason
    ]
    return min(told, key=lambda each: each[0])[1] if told else Failure()


def judge(
    logs: Sequence[GrowingLog], attempt: TrainingLog, job: SlurmJob | None, failure: Failure, now: datetime
) -> tuple[State, str]:
    """Returns the state of a run, and why it is so, if that needs words.

    Args:
        logs: logs of the newest attempt.
        attempt: these logs, merged into one.
        job: what Slurm knows.
        failure: see `find_failure`.
        now: current time by this machine's clock.
    """
    steps = attempt.this_start
    if job and job.state in WAITING:
        return "waiting", ""
    if job and job.state in RUNNING and job.start and _modified(logs) < job.start:
        return "starting", "there is no log of this start yet"
    if end := _end(attempt):
        return ("finished", "") if is_done(attempt) else ("stopped", end)
    ended = job is not None and job.state not in RUNNING
    if failure.cancelled:
        return "stopped", f"Slurm: {job.state}" if job and ended else ""
    if job and ended and job.state != COMPLETED:
        return ("failed" if job.state in FAILED else "stopped"), f"Slurm: {job.state}"
    silence, limit = _silence(steps, attempt, logs, now)
    is_last_word = failure.certain or not steps or failure.log == _trains_in(logs)
    if failure.what and (ended or is_last_word or silence > limit):
        return "failed", ""
    if ended:
        return "stopped", "Slurm: COMPLETED, and the log does not say that training is done"
    if silence > limit:
        return "hung", f"no new line for {_span(silence)}, and {_span(limit)} is already long for this run"
    return ("training", "") if steps else ("starting", "no iteration yet")


def is_done(attempt: TrainingLog) -> bool:
    """Returns whether an attempt has ended with all iterations made."""
    steps, end = attempt.this_start, _end(attempt)
    return end == DONE or (bool(end) and bool(steps) and steps[-1].iteration >= steps[-1].last)


def _end(attempt: TrainingLog) -> str:
    """Returns how the newest start of an attempt has ended; empty while it goes on."""
    over = attempt.ends and attempt.ends[-1].time >= max(attempt.starts, default=datetime.min)
    return attempt.ends[-1].what if over else ""


def _silence(
    steps: Sequence[Iteration], attempt: TrainingLog, logs: Sequence[GrowingLog], now: datetime
) -> tuple[timedelta, timedelta]:
    """Returns for how long neither iteration nor checkpoint has come, and how long that may be."""
    if not steps:
        return now - _modified(logs), START_STALL
    signs = [steps[-1].time, *(each[-1].time for each in (attempt.saving, attempt.saved) if each)]
    pauses = [after.time - before.time for before, after in pairwise(steps)] or [timedelta(0)]
    usual, longest = median(pauses[-RECENT_PAUSES:]), max(pauses)
    return now - max(signs), max(SHORTEST_STALL, USUAL_PAUSES * usual, LONGEST_PAUSES * longest)


def _trains_in(logs: Sequence[GrowingLog]) -> Path:
    """Returns the path of the log that has the lines of iterations."""
    return max(logs, key=lambda log: log.training.printed[-1].time if log.training.printed else datetime.min).path


def _modified(logs: Sequence[GrowingLog]) -> datetime:
    return datetime.fromtimestamp(max(log.modified for log in logs))


def _span(span: timedelta) -> str:
    """Returns a duration in words: ``3 min``, ``2 h 05 min``."""
    minutes = int(span.total_seconds()) // 60
    return f"{minutes // 60} h {minutes % 60:02d} min" if minutes >= 60 else f"{minutes} min"
