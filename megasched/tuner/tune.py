"""Searches a space by a function of a program, as ``megasched tune`` does by runs of a command."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megasched.errors import ConfigError, MegaschedError
from megasched.launch.status.failure_log import OUT_OF_MEMORY
from megasched.tuner.outcome import Result
from megasched.tuner.space import Space

try:
    from megasched.tuner.study import Search, Tuning
except ModuleNotFoundError as error:
    raise ConfigError(f"{error.name} is missing: pip install 'megasched[tune]'") from error

Objective = Callable[[dict[str, Any]], float]


def tune(
    objective: Objective,
    space: Space,
    *,
    trials: int | None = None,
    sampler: str = "model",
    seed: int = 0,
    folder: str | Path | None = None,
) -> Tuning:
    """Looks for the point of a space at which a function is largest, in few calls.

    What the function raises is what a trial says: no memory (``torch.OutOfMemoryError``, for one), which rules out
    all points that need at least as much; an error of megasched's, by which the point is refused; anything else
    is a crash, of which nothing is learned.

    Args:
        objective: takes a point (symbol -> value) and returns a positive number, larger where it is better.
        trials: number of trials in all; a fifth of the points by default, at least 10.
        sampler: how points are chosen: ``model``, ``tpe`` or ``grid``.
        folder: keeps the study, so that the same program goes on after it was stopped; in memory by default.

    Returns:
        All trials; ``best`` is the one of the largest number, None where none has one.

    Raises:
        ConfigError: the space can't be searched, the folder is of another space or function, the function
            returned something else than a positive number, or the first trials all failed.
    """
    path = None if folder is None else Path(folder)
    if path is not None:
        path.mkdir(parents=True, exist_ok=True)
    name = f"{getattr(objective, '__module__', '')}.{getattr(objective, '__qualname__', repr(objective))}"
    search = Search(space, sampler, seed=seed, folder=path, command=[name])
    return search.run(FunctionRunner(objective), trials)


class FunctionRunner:
    """Makes each trial by a call of a function in this process."""

    def __init__(self, objective: Objective) -> None:
        self.objective = objective

    def run(self, number: int, point: dict[str, Any]) -> Result:
        """Calls the function at a point and returns the result.

        Raises:
            ConfigError: it returned something else than a positive number.
        """
        try:
            score = self.objective(dict(point))
        except Exception as error:  # of whatever kind: what it is decides on the outcome
            return _failed(error)
        if not isinstance(score, int | float) or not 0 < score < math.inf:
            raise ConfigError(
                f"the objective returned {score!r} at {point}; it returns a positive number, larger where it is "
                "better: for a time, what is done in a second"
            )
        return Result("ok", float(score))


def _failed(error: Exception) -> Result:
    why = f"{type(error).__name__}: {error}".partition("\n")[0]
    if isinstance(error, MegaschedError):
        return Result("refused", why=why)
    if isinstance(error, MemoryError) or OUT_OF_MEMORY.search(why):
        return Result("oom", why=why)
    return Result("crash", why=why)
