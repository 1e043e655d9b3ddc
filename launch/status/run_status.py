"""Tells how a run is doing, from its logs and from Slurm, without a GPU, torch or Megatron."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from itertools import batched
from pathlib import Path
from statistics import fmean
from typing import Any

from megasched.errors import ConfigError
from megasched.launch.run_folder import RunFolder, RunLogs, find_logs
from megasched.launch.slurm.client import JOB_ID, PART_OF_A_JOB, SlurmJob, ask_slurm
from megasched.launch.status.growing_log import GrowingLog
from megasched.launch.status.run_state import ENDED, State, find_failure, is_done, judge
from megasched.launch.status.training_log import Checkpoint, Iteration, RankTimes, TrainingLog, merge
from megasched.slurm import FAILED, RUNNING, WAITING, NoAnswerError

# Speed is a mean over so many lines.
RECENT_LINES = 20
TREND_POINTS = 60
# Of what is longer nobody knows the end: some 30 years.
MOST_SECONDS_LEFT = 1e9


@dataclass(frozen=True)
class RunStatus:
    """Describes how a run is doing; times are of the clocks that printed them.

    Attributes:
        path: path of the run's folder or log.
        state: see `run_state.State`.
        why: reason for the state, in one sentence; empty where it needs none.
        iteration: number of the newest iteration.
        last: number of the iteration that ends the run.
        time: time of the newest line of an iteration.
        loss: loss of the newest iteration that has one, nats per token; NaN where that was no number.
        grad_norm: gradient norm of the newest iteration.
        seconds: seconds of one iteration, without validation and checkpoints.
        samples_per_second: speed of the whole job.
        tokens_per_second: speed of the whole job; None where the log does not tell sequence length and batch size.
        tokens_per_gpu: tokens per second of one GPU.
        tflops: TFLOP/s of one GPU; None without ``--log-throughput``.
        rank_times: newest times of the slowest and the fastest rank; None without ``--log-straggler``.
        gpus: number of GPUs of the job.
        skipped, nan: number of iterations that were skipped, or whose loss was no number, since the beginning.
        restarts: how often its processes were started again.
        validation_iteration, validation: the newest validation loss.
        saved: the newest checkpoint; None if there is none.
        saving: a checkpoint that is being written.
        seconds_left: seconds to the last iteration of a run that trains, by the clock since the last start, so
            that validation and checkpoints count.
        error: what went wrong, where something did.
        error_log: the log that says so.
        trend: mean loss over the run, in at most `TREND_POINTS` points: (iteration, loss).
        slurm: what Slurm knows about the job; None where it knows nothing.
    """

    path: str
    state: State
    why: str = ""
    iteration: int = 0
    last: int = 0
    time: datetime | None = None
    loss: float | None = None
    grad_norm: float | None = None
    seconds: float | None = None
    samples_per_second: float | None = None
    tokens_per_second: float | None = None
    tokens_per_gpu: float | None = None
    tflops: float | None = None
    rank_times: RankTimes | None = None
    gpus: int | None = None
    skipped: int = 0
    nan: int = 0
    restarts: int = 0
    validation_iteration: int | None = None
    validation: float | None = None
    saved: Checkpoint | None = None
    saving: Checkpoint | None = None
    seconds_left: float | None = None
    error: str = ""
    error_log: str = ""
    trend: tuple[tuple[int, float], ...] = ()
    slurm: SlurmJob | None = None

    @property
    def ended(self) -> bool:
        """Returns whether nothing more is to come, as far as logs and Slurm tell."""
        return self.state in ENDED and (self.slurm is None or self.slurm.state not in RUNNING | WAITING)

    def to_dict(self) -> dict[str, Any]:
        """Returns the status as plain data for JSON, with times as ISO 8601."""
        found = asdict(self)
        for name in ("saved", "saving", "rank_times"):
            told = getattr(self, name)
            found[name] = told and told._asdict()
        return {name: _plain(value) for name, value in found.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    return value.isoformat() if isinstance(value, datetime) else value


class RunReader:
    """Looks at a run again and again; each look reads only what is new in the logs."""

    def __init__(self, target: str) -> None:
        """Decides whether the target is a path or a job.

        Args:
            target: a run's folder, one of its logs, or a job id of Slurm's. A path that exists comes first.
        """
        path = Path(target)
        is_job = not path.exists() and any(form.fullmatch(target) for form in (JOB_ID, PART_OF_A_JOB))
        self.path = None if is_job else path
        self.job_id = target if is_job else ""
        self._logs: dict[Path, GrowingLog] = {}

    def look(self, now: datetime | None = None) -> RunStatus:
        """Returns how the run is doing now.

        Args:
            now: time to use instead of this machine's clock.

        Raises:
            ConfigError: there are no logs, none is of a run or can be read, or Slurm can't tell where they are.
        """
        job = None
        if self.path is None:
            job = ask_slurm(self.job_id)
            self.path = _logs_of(job)
            if self.path is None:
                folder = str(job.script.parent) if job.script else job.output
                return RunStatus(folder, *_state_without_logs(job), slurm=job)
        elif (queued := _queued(self.path)) is not None:
            return RunStatus(str(self.path), *_state_without_logs(queued), slurm=queued)
        try:
            logs = find_logs(self.path)
            for path in logs.paths:
                self._logs.setdefault(path, GrowingLog(path)).refresh()
        except OSError as error:
            raise ConfigError(f"{error.filename}: it can't be read: {error.strerror}") from error
        job = job or _quietly(self.job_id) or _job_of(self.path, logs, self._logs)
        if job is None and not RunFolder(self.path).attempts():
            _refuse_foreign(logs, self._logs)
        return summarize(logs, self._logs, job, now or datetime.now())


def _refuse_foreign(logs: RunLogs, read: Mapping[Path, GrowingLog]) -> None:
    """Raises ConfigError where no log is of a run, and none tells of a failure; nobody knows what wrote them."""
    found = [read[path] for path in logs.paths]
    if all(log.foreign and not any(log.failure.reasons) for log in found):
        names = ", ".join(path.name for path in logs.paths)
        raise ConfigError(
            f"{logs.path}: there is no run: no line of {names} is megasched's or Megatron's; name a run's folder, "
            "one of its logs, or a Slurm job"
        )


def _logs_of(job: SlurmJob) -> Path | None:
    """Returns the folder of a job if it has a launcher's logs, else the file of the job's output; None without."""
    if job.script is not None and RunFolder(job.script.parent).attempts():
        return job.script.parent
    output = Path(job.output)
    return output if job.output and output.is_file() else None


def _queued(path: Path) -> SlurmJob | None:
    """Returns the job of a run's folder that has left no logs yet; None where there are logs or no job."""
    folder = RunFolder(path)
    if not path.is_dir() or folder.attempts():
        return None
    jobs = folder.described().get("jobs") or []
    return _quietly(str(jobs[0])) if jobs else None


def _job_of(path: Path, logs: RunLogs, read: Mapping[Path, GrowingLog]) -> SlurmJob | None:
    """Returns the job of the newest logs, or one that is to go on with the run where that has ended."""
    writer, ended = logs.attempts[-1].name, None
    submitted = [str(job) for job in RunFolder(path).described().get("jobs") or []]
    if writer in submitted and is_done(_newest_attempt(logs, read)):
        submitted = []  # what is left of a chain finds nothing to do
    for job in _jobs([writer, *submitted]):
        if job.state in WAITING | RUNNING:
            return job
        if job.job_id == writer:
            ended = job
    return ended


def _quietly(job_id: str) -> SlurmJob | None:
    """Returns what Slurm knows of a job; None where it can't be asked, or where the name is none of its jobs."""
    return next(_jobs([job_id]), None)


def _jobs(names: Iterable[str]) -> Iterator[SlurmJob]:
    """Yields the jobs of Slurm's among these names, each once, as long as it answers."""
    for name in filter(JOB_ID.fullmatch, dict.fromkeys(names)):
        try:
            yield ask_slurm(name)
        except ConfigError as error:
            if isinstance(error.__cause__, NoAnswerError):  # each more would take as long
                return


def _state_without_logs(job: SlurmJob) -> tuple[State, str]:
    if job.state in WAITING:
        return "waiting", ""
    if job.state in RUNNING:
        return "starting", "there is no log yet"
    return ("failed" if job.state in FAILED else "stopped"), f"Slurm: {job.state}; its logs were not found"


def summarize(logs: RunLogs, read: Mapping[Path, GrowingLog], job: SlurmJob | None, now: datetime) -> RunStatus:
    """Returns what logs and Slurm say together.

    Args:
        logs: logs of the run.
        read: content of each log, by path.
        job: what Slurm knows.
        now: current time by this machine's clock.
    """
    training = merge(read[path].training for path in logs.paths)
    attempt = _newest_attempt(logs, read)
    steps, current = training.iterations, attempt.this_start
    failure = find_failure(logs, read, steps[-1] if steps else None)
    state, why = judge([read[path] for path in logs.attempts[-1].logs], attempt, job, failure, now)
    newest = steps[-1] if steps else Iteration(0, math.nan, math.nan)
    going = state in ("training", "hung")
    return RunStatus(
        path=str(logs.path),
        state=state,
        why=why,
        iteration=newest.iteration,
        last=newest.last,
        time=newest.time if steps else None,
        loss=_newest_loss(steps),
        grad_norm=newest.grad_norm,
        **_speed(current or steps, training.arguments),
        rank_times=attempt.rank_times[-1] if attempt.rank_times else None,
        skipped=sum(step.skipped for step in steps),
        nan=sum(step.nan for step in steps),
        restarts=max(len(logs.attempts) - 1, len(training.starts) - 1, job.restarts if job else 0),
        **_validation(training, newest),
        saved=training.saved[-1] if training.saved else None,
        saving=_being_saved(attempt) if going else None,
        seconds_left=_seconds_left(current) if going else None,
        error=failure.what if state != "finished" else "",
        error_log=str(failure.log or "") if state != "finished" else "",
        trend=_trend(steps),
        slurm=job,
    )


def _newest_attempt(logs: RunLogs, read: Mapping[Path, GrowingLog]) -> TrainingLog:
    return merge(read[path].training for path in logs.attempts[-1].logs)


def _newest_loss(steps: Sequence[Iteration]) -> float | None:
    """Returns the newest loss, NaN only where it was none; an iteration that was skipped has no own loss."""
    for step in reversed(steps):
        if not math.isnan(step.loss) or not step.skipped:
            return step.loss
    return None


def _speed(steps: Sequence[Iteration], arguments: Mapping[str, int]) -> dict[str, Any]:
    """Returns the speed by the newest lines of one start, without the first line, which warms up."""
    gpus = arguments.get("world_size")
    recent = (steps[1:] or steps)[-RECENT_LINES:]
    if not recent:
        return {"gpus": gpus}
    seconds = fmean(step.seconds for step in recent)
    samples = fmean(step.samples for step in recent) / seconds if seconds and recent[-1].samples else None
    tokens = samples * arguments["seq_length"] if samples and "seq_length" in arguments else None
    tflops = [step.tflops for step in recent if step.tflops is not None]
    return {
        "gpus": gpus,
        "seconds": seconds,
        "samples_per_second": samples,
        "tokens_per_second": tokens,
        "tokens_per_gpu": tokens / gpus if tokens and gpus else None,
        "tflops": fmean(tflops) if tflops else None,
    }


def _validation(training: TrainingLog, newest: Iteration) -> dict[str, Any]:
    # What a run that has gone back to a checkpoint had found beyond it is to be found again.
    valid = [iteration for iteration in training.validation if iteration <= newest.iteration]
    if not valid:
        return {}
    return {"validation_iteration": max(valid), "validation": training.validation[max(valid)]}


def _being_saved(training: TrainingLog) -> Checkpoint | None:
    """Returns the checkpoint that the running processes have begun and not completed; None without one."""
    if not training.saving:
        return None
    begun = training.saving[-1]
    complete = any(one.iteration == begun.iteration and one.time >= begun.time for one in training.saved)
    return None if complete or begun.time < max(training.starts, default=datetime.min) else begun


def _seconds_left(steps: Sequence[Iteration]) -> float | None:
    if not steps:
        return None
    made = steps[-1].iteration - steps[0].iteration
    each = (steps[-1].time - steps[0].time).total_seconds() / made if made else steps[-1].seconds
    left = each * (steps[-1].last - steps[-1].iteration)
    return left if 0 <= left < MOST_SECONDS_LEFT else None


def _trend(steps: Sequence[Iteration]) -> tuple[tuple[int, float], ...]:
    """Returns mean losses over stretches of equal length, each with its last iteration."""
    found = [step for step in steps if math.isfinite(step.loss)]
    length = math.ceil(len(found) / TREND_POINTS) or 1
    return tuple((part[-1].iteration, fmean(step.loss for step in part)) for part in batched(found, length))
