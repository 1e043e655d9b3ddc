"""Searches for ``megasched tune`` and ``megasched.tune``, and keeps trials in a file, as a study of Optuna.

So a search can be stopped, and the same command or program goes on.
"""

from __future__ import annotations

import fcntl
import json
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import optuna
from optuna.trial import TrialState

from megasched.errors import ConfigError
from megasched.tuner.outcome import Result
from megasched.tuner.samplers import POINT, RESULT, SAMPLERS, Encoding, PointSampler, history
from megasched.tuner.space import Space

NAME = "megasched tune"
FILE = "study.sqlite"
LOCK = "study.lock"
# When the first trials all end so, the mistake is in what is tried, and more of them would be of no use.
HOPELESS = 3
SHARE, FEWEST = 0.2, 10


@dataclass(frozen=True)
class Trial:
    """Describes a trial that ended.

    Attributes:
        number: counted from 0.
        point: symbol -> value.
    """

    number: int
    point: dict[str, Any]
    result: Result


def open_study(folder: Path | None, space: Space, command: Sequence[str], sampler: PointSampler) -> optuna.Study:
    """Opens a new study, or the one in the folder.

    Args:
        folder: holds the study as ``study.sqlite``; None for a study in memory.
        command: command line of the trials, without the flags that are tried.

    Raises:
        ConfigError: the one in the folder is of another space or command, or can't be read.
    """
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
    storage = None if folder is None else _storage(folder / FILE)
    study = optuna.create_study(
        storage=storage, sampler=sampler, study_name=NAME, direction="maximize", load_if_exists=True
    )
    about = {"space": space.fingerprint, "symbols": _describe(space), "command": list(command)}
    if not study.user_attrs:
        for name, value in about.items():
            study.set_user_attr(name, value)
    elif study.user_attrs != about:
        raise ConfigError(_changed(folder, study.user_attrs, about))
    return study


@contextmanager
def alone_in(folder: Path | None) -> Iterator[None]:
    """Keeps other searches of the study in a folder out, until the body or the process ends.

    Raises:
        ConfigError: another one is running.
    """
    with ExitStack() as held:
        if folder is not None:
            file = held.enter_context((folder / LOCK).open("a"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(
                    f"{folder}: another search of this study is running; wait for its end, or take another folder"
                ) from None
            except OSError as error:  # of a file system that has no locks
                warnings.warn(f"{folder}: nothing keeps a second search out: {error.strerror}", stacklevel=3)
        yield


def close_cut_off(study: optuna.Study) -> None:
    """Closes trials that ended with their process, so that their points are open again."""
    for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        study.tell(trial.number, state=TrialState.FAIL)


def _storage(path: Path) -> optuna.storages.RDBStorage:
    from sqlalchemy import URL
    from sqlalchemy.exc import SQLAlchemyError

    try:
        return optuna.storages.RDBStorage(URL.create("sqlite", database=str(path)).render_as_string())
    except (SQLAlchemyError, RuntimeError) as error:
        raise ConfigError(f"{path}: it can't be used as a study: {error}") from error


def _describe(space: Space) -> dict[str, list[Any]]:
    return {symbol.name: list(symbol.values) for symbol in space.symbols.values()}


def _changed(folder: Path | None, before: dict[str, Any], now: dict[str, Any]) -> str:
    lines = []
    old, new = before.get("symbols", {}), now["symbols"]
    for name in dict.fromkeys([*old, *new]):
        if old.get(name) != new.get(name):
            lines.append(f"{name}: {json.dumps(old.get(name))} then, {json.dumps(new.get(name))} now")
    if not lines and before.get("space") != now["space"]:
        lines.append("the conditions of the space, or what is said about memory")
    if before.get("command") != now["command"]:
        lines.append(f"the command: {before.get('command')} then")
    listed = "".join(f"\n  - {line}" for line in lines)
    return (
        f"the study in {folder} is of something else:{listed}\n"
        "its trials can't be compared with new ones; take another folder, or undo the change"
    )


def begin_trial(study: optuna.Study, space: Space) -> optuna.Trial:
    """Lets the sampler choose a point, and stores it with a new trial.

    Raises:
        LookupError: no point is left.
    """
    trial = study.ask()
    point: dict[str, Any] = {}
    for symbol in space.symbols.values():
        if not symbol.is_active(point):
            continue
        if symbol.ordered:
            rank = trial.suggest_int(symbol.name, 0, len(symbol.values) - 1)
            point[symbol.name] = sorted(symbol.values)[rank]
        else:
            point[symbol.name] = trial.suggest_categorical(symbol.name, symbol.values)
    trial.set_user_attr(POINT, space.place(point))
    return trial


def end_trial(study: optuna.Study, trial: optuna.Trial, result: Result) -> None:
    """Stores the result of a trial.

    Optuna's own samplers learn from pruned trials that a place is bad, and nothing from failed ones.
    """
    trial.set_user_attr(RESULT, {"outcome": result.outcome, "seconds": result.seconds, "why": result.why})
    if result.score is not None:
        study.tell(trial, result.score)
    else:
        study.tell(trial, state=TrialState.FAIL if result.outcome == "crash" else TrialState.PRUNED)


def ended_trials(study: optuna.Study, space: Space) -> list[Trial]:
    """Returns all trials that ended, in their order."""
    found = []
    for trial in study.get_trials(deepcopy=False):
        told = trial.user_attrs
        if RESULT in told and trial.state.is_finished():
            result = Result(score=trial.value, **told[RESULT])
            found.append(Trial(trial.number, space.points[told[POINT]], result))
    return found


class Runner(Protocol):
    """Carries out trials."""

    def run(self, number: int, point: dict[str, Any]) -> Result:
        """Runs a trial at this point and returns its result; ends the run before a KeyboardInterrupt goes on."""


@dataclass
class Tuning:
    """Holds what a search has found so far.

    Attributes:
        points: number of points of the space.
        ruled_out: number of points without a trial that must run out of memory, because others did.
    """

    points: int
    trials: list[Trial] = field(default_factory=list)
    ruled_out: int = 0

    @property
    def best(self) -> Trial | None:
        scored = [trial for trial in self.trials if trial.result.score is not None]
        return max(scored, key=lambda trial: trial.result.score or 0.0, default=None)


def default_trials(points: int) -> int:
    """Returns a fifth of the points, but at least 10 where there are 10."""
    return min(points, max(FEWEST, math.ceil(SHARE * points)))


class Search:
    """Searches a space by trials; in a folder with a study it goes on where that was.

    Args:
        sampler: one of ``SAMPLERS``, which chooses the points.
        first: places of the points to begin with.
        folder: holds the study; None for one in memory.
        command: what is tried: a command line without the flags of a point, or the name of a function.

    Raises:
        ConfigError: there is no such sampler, or the folder holds a study of something else.
    """

    def __init__(
        self,
        space: Space,
        sampler: str = "model",
        *,
        seed: int = 0,
        first: Iterable[int] = (),
        folder: Path | None = None,
        command: Sequence[str] = (),
    ) -> None:
        if sampler not in SAMPLERS:
            raise ConfigError(f"sampler {sampler}: there are {', '.join(SAMPLERS)}")
        self.space = space
        self.sampler = SAMPLERS[sampler](Encoding(space), seed=seed, first=first)
        self._folder = folder
        self.study = open_study(folder, space, command, self.sampler)

    def run(
        self,
        runner: Runner,
        trials: int | None = None,
        *,
        on_start: Callable[[dict[str, Any], Tuning], None] = lambda point, tuning: None,
        on_end: Callable[[Tuning], None] = lambda tuning: None,
    ) -> Tuning:
        """Makes trials until the study has ``trials`` of them, or no point is left.

        Args:
            trials: number of trials in all, those included that the study has already; by default as many as
                ``default_trials`` says.
            on_start: called with a point before its trial.
            on_end: called after each trial.

        Raises:
            ConfigError: the first trials all crashed or were refused, or another search of the study is running.
        """
        with alone_in(self._folder):
            close_cut_off(self.study)
            return self._run(runner, trials or default_trials(len(self.space.points)), on_start, on_end)

    def _run(
        self,
        runner: Runner,
        trials: int,
        on_start: Callable[[dict[str, Any], Tuning], None],
        on_end: Callable[[Tuning], None],
    ) -> Tuning:
        tuning = self.so_far()
        while len(tuning.trials) < trials:
            try:
                trial = begin_trial(self.study, self.space)
            except LookupError:
                break
            point = self.space.points[trial.user_attrs["point"]]
            on_start(point, tuning)
            try:
                result = runner.run(trial.number, point)
            except BaseException:
                self.study.tell(trial, state=TrialState.FAIL)
                raise
            end_trial(self.study, trial, result)
            tuning = self.so_far()
            on_end(tuning)
            _stop_if_hopeless(tuning)
        return tuning

    def so_far(self) -> Tuning:
        """Returns what the study holds."""
        trials = ended_trials(self.study, self.space)
        points, left = len(self.space.points), len(self.sampler.open_points(history(self.study)))
        return Tuning(points, trials, points - left - len({str(t.point) for t in trials}))


def _stop_if_hopeless(tuning: Tuning) -> None:
    outcomes = {trial.result.outcome for trial in tuning.trials}
    if len(tuning.trials) == HOPELESS and outcomes <= {"crash", "refused"}:
        lines = [f"  - trial {trial.number} {trial.result.outcome}: {trial.result.why}" for trial in tuning.trials]
        raise ConfigError(
            "\n".join([f"the first {HOPELESS} trials all failed, so that what is tried may be wrong:", *lines])
            + "\nstarted again, the search goes on, if these were bad luck"
        )
