"""The search: a point, a run, what came of it; until enough trials were made or no point is left."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import optuna
from optuna.trial import TrialState

from megasched.errors import ConfigError
from megasched.tuner.outcome import Result
from megasched.tuner.samplers import PointSampler, history
from megasched.tuner.space import Space
from megasched.tuner.study import Trial, begin_trial, end_trial, ended_trials

# When the first trials all end so, the mistake is in the command, and more of them would be of no use.
HOPELESS = 3
SHARE, FEWEST = 0.2, 10


class Runner(Protocol):
    """Carries out trials."""

    def run(self, number: int, point: dict[str, Any]) -> Result:
        """What came of a run at this point; a KeyboardInterrupt has ended the run before it goes on."""


@dataclass
class Tuning:
    """What a search has found so far.

    Attributes:
        points: of the space.
        ruled_out: points without a trial that must run out of memory, because others did.
    """

    points: int
    trials: list[Trial] = field(default_factory=list)
    ruled_out: int = 0

    @property
    def best(self) -> Trial | None:
        scored = [trial for trial in self.trials if trial.result.score is not None]
        return max(scored, key=lambda trial: trial.result.score or 0.0, default=None)


def default_trials(points: int) -> int:
    """A fifth of the points, but at least 10 where there are so many."""
    return min(points, max(FEWEST, math.ceil(SHARE * points)))


def tune(
    study: optuna.Study,
    space: Space,
    sampler: PointSampler,
    runner: Runner,
    trials: int,
    *,
    on_start: Callable[[dict[str, Any], Tuning], None] = lambda point, tuning: None,
    on_end: Callable[[Tuning], None] = lambda tuning: None,
) -> Tuning:
    """Makes trials until the study has so many, or no point is left.

    Args:
        trials: in all, those included that the study has already.
        on_start: called with a point before its trial.
        on_end: called after each trial.

    Raises:
        ConfigError: the first trials all crashed or were refused.
    """
    tuning = tuning_so_far(study, space, sampler)
    while len(tuning.trials) < trials:
        try:
            trial = begin_trial(study, space)
        except LookupError:
            break
        point = space.points[trial.user_attrs["point"]]
        on_start(point, tuning)
        try:
            result = runner.run(trial.number, point)
        except BaseException:
            study.tell(trial, state=TrialState.FAIL)
            raise
        end_trial(study, trial, result)
        tuning = tuning_so_far(study, space, sampler)
        on_end(tuning)
        _stop_if_hopeless(tuning)
    return tuning


def tuning_so_far(study: optuna.Study, space: Space, sampler: PointSampler) -> Tuning:
    """What the study holds."""
    trials = ended_trials(study, space)
    left = len(sampler.open_points(history(study)))
    return Tuning(len(space.points), trials, len(space.points) - left - len({str(t.point) for t in trials}))


def _stop_if_hopeless(tuning: Tuning) -> None:
    outcomes = {trial.result.outcome for trial in tuning.trials}
    if len(tuning.trials) == HOPELESS and outcomes <= {"crash", "refused"}:
        lines = [f"  - trial {trial.number} {trial.result.outcome}: {trial.result.why}" for trial in tuning.trials]
        raise ConfigError(
            "\n".join([f"the first {HOPELESS} trials all failed, so that the command may be wrong:", *lines])
            + "\nthe same command goes on, if these were bad luck"
        )
