"""The study of Optuna that holds all trials: in a file, so that a search can be stopped and goes on."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import TrialState

from megasched.errors import ConfigError
from megasched.tuner.outcome import Result
from megasched.tuner.samplers import POINT, RESULT, PointSampler
from megasched.tuner.space import Space

NAME = "megasched tune"
FILE = "study.sqlite"


@dataclass(frozen=True)
class Trial:
    """A trial that ended.

    Attributes:
        number: counted from 0.
        point: symbol -> value.
    """

    number: int
    point: dict[str, Any]
    result: Result


def open_study(folder: Path | None, space: Space, command: Sequence[str], sampler: PointSampler) -> optuna.Study:
    """A new study, or the one in the folder; trials that were cut off are closed, and their points open again.

    Args:
        folder: it is ``study.sqlite`` there; None for one in memory.
        command: what the trials run, without what is tried.

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
    for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        study.tell(trial.number, state=TrialState.FAIL)
    return study


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
        "its trials can't be compared with new ones; take another folder with --dir, or undo the change"
    )


def begin_trial(study: optuna.Study, space: Space) -> optuna.Trial:
    """Has the sampler choose a point, and stores it with the trial.

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
    """Stores what came of a trial.

    Optuna's own samplers learn from pruned trials that a place is bad, and nothing from failed ones.
    """
    trial.set_user_attr(RESULT, {"outcome": result.outcome, "seconds": result.seconds, "why": result.why})
    if result.score is not None:
        study.tell(trial, result.score)
    else:
        study.tell(trial, state=TrialState.FAIL if result.outcome == "crash" else TrialState.PRUNED)


def ended_trials(study: optuna.Study, space: Space) -> list[Trial]:
    """All trials that ended, in their order."""
    found = []
    for trial in study.get_trials(deepcopy=False):
        told = trial.user_attrs
        if RESULT in told and trial.state.is_finished():
            result = Result(score=trial.value, **told[RESULT])
            found.append(Trial(trial.number, space.points[told[POINT]], result))
    return found
