"""Defines samplers of Optuna that propose nothing but points of the space that may still be worth a trial.

``Encoding`` has the points as numbers, and tells which points must fit, or run out of memory, if another one does.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.samplers import BaseSampler, TPESampler

from megasched.tuner.outcome import Outcome
from megasched.tuner.space import Space, Symbol
from megasched.tuner.surrogate import GaussianProcess, expected_improvement, normal_cdf

# In place of a code, for a symbol without a value.
INACTIVE = -1
# What a trial of a study has beside Optuna's own: place in space.points, and its Result without the score.
POINT, RESULT = "point", "result"


@dataclass(frozen=True)
class Seen:
    """Describes a point that was tried.

    Attributes:
        place: index of the point in ``space.points``.
    """

    place: int
    outcome: Outcome
    score: float | None


def history(study: optuna.Study) -> list[Seen]:
    """Returns the trials that ended, in their order; an interrupted one has not ended."""
    return [
        Seen(trial.user_attrs[POINT], trial.user_attrs[RESULT]["outcome"], trial.value)
        for trial in study.get_trials(deepcopy=False)
        if RESULT in trial.user_attrs
    ]


class Encoding:
    """Holds a space's points as arrays, in the order of ``space.points``.

    Attributes:
        codes: [n, s]; place of each symbol's value, -1 where it has none.
    """

    def __init__(self, space: Space) -> None:
        self.space = space
        symbols = space.symbols.values()
        self.codes = np.array(
            [[s.ranks[point[s.name]] if s.name in point else INACTIVE for s in symbols] for point in space.points]
        )

    @cached_property
    def coordinates(self) -> np.ndarray:
        """Returns the points as [n, d], without axes on which all points are equal.

        An ordered symbol is one axis from 0 to 1, evenly spaced, any other one axis a value; where a symbol can be
        inactive, that is an axis of its own.
        """
        columns = []
        for codes, symbol in zip(self.codes.T, self.space.symbols.values(), strict=True):
            inactive = codes == INACTIVE
            if symbol.ordered:
                columns.append(np.where(inactive, 0.0, codes / max(1, len(symbol.values) - 1)))
            else:
                columns += [np.where(codes == value, 0.5, 0.0) for value in range(len(symbol.values))]
            if inactive.any():
                columns.append(np.where(inactive, 1.0, 0.0))
        found = np.stack(columns, axis=1)
        varying = found.max(axis=0) > found.min(axis=0)
        return found[:, varying]

    def must_oom(self, at: int) -> np.ndarray:
        """Returns [n] bool: which points need at least as much memory as this one, itself included.

        Those are at least as large in every symbol with which memory grows, at most as large where it shrinks, and
        equal in all others.
        """
        return self._beyond(at, 1)

    def must_fit(self, at: int) -> np.ndarray:
        """Returns [n] bool: which points need at most as much memory as this one, itself included."""
        return self._beyond(at, -1)

    def _beyond(self, at: int, direction: int) -> np.ndarray:
        signs = {"grows": 1, "shrinks": -1, None: 0}
        sign = direction * np.array([signs[symbol.memory] for symbol in self.space.symbols.values()])
        here = self.codes[at]
        alike = ((self.codes == INACTIVE) == (here == INACTIVE)).all(axis=1)
        apart, free = self.codes - here, sign != 0
        return alike & (apart[:, ~free] == 0).all(axis=1) & (apart[:, free] * sign[free] >= 0).all(axis=1)


def distributions(space: Space) -> dict[str, BaseDistribution]:
    """Returns Optuna's distribution of each symbol; numbers are places in order of size, to have neighbours."""
    return {
        symbol.name: IntDistribution(0, len(symbol.values) - 1)
        if symbol.ordered
        else CategoricalDistribution(symbol.values)
        for symbol in space.symbols.values()
    }


def parameter(symbol: Symbol, value: Any) -> Any:
    """Returns a value in the form in which Optuna knows it."""
    return symbol.ranks[value] if symbol.ordered else value


class PointSampler(BaseSampler, ABC):
    """Proposes points in a queue first, then those that `propose` chooses.

    It never proposes one that was tried, or one that must run out of memory because another one did.

    Args:
        first: points to begin with, by their places.
    """

    def __init__(self, encoding: Encoding, *, seed: int = 0, first: Iterable[int] = ()) -> None:
        self.encoding, self.space = encoding, encoding.space
        self.random = np.random.default_rng(seed)
        self.queue = deque(first)

    def open_points(self, seen: list[Seen]) -> np.ndarray:
        """Returns the places of the points that may still be tried, ascending."""
        closed = np.zeros(len(self.space.points), dtype=bool)
        for one in seen:
            closed[one.place] = True
            if one.outcome == "oom":
                closed |= self.encoding.must_oom(one.place)
        return np.flatnonzero(~closed)

    def next_point(self, study: optuna.Study, trial: optuna.trial.FrozenTrial) -> int:
        """Returns the place of the point that is tried next.

        Raises:
            LookupError: every point was tried or ruled out.
        """
        seen = history(study)
        open_points = self.open_points(seen)
        if not len(open_points):
            raise LookupError
        while self.queue:
            place = self.queue.popleft()
            if place in open_points:
                return place
        return int(self.propose(study, trial, seen, open_points))

    @abstractmethod
    def propose(
        self, study: optuna.Study, trial: optuna.trial.FrozenTrial, seen: list[Seen], open_points: np.ndarray
    ) -> int:
        """Returns one of the open points."""

    # ---- what Optuna asks for -----------------------------------------------------------------------

    def infer_relative_search_space(
        self, study: optuna.Study, trial: optuna.trial.FrozenTrial
    ) -> dict[str, BaseDistribution]:
        return distributions(self.space)

    def sample_relative(
        self, study: optuna.Study, trial: optuna.trial.FrozenTrial, search_space: Mapping[str, BaseDistribution]
    ) -> dict[str, Any]:
        point = self.space.points[self.next_point(study, trial)]
        return {name: parameter(self.space.symbols[name], value) for name, value in point.items()}

    def sample_independent(
        self, study: optuna.Study, trial: optuna.trial.FrozenTrial, name: str, distribution: BaseDistribution
    ) -> Any:
        raise AssertionError(f"{name} was not proposed with the rest of its point")


class GridPoints(PointSampler):
    """Proposes every point, in the order of the space."""

    def propose(self, study: Any, trial: Any, seen: list[Seen], open_points: np.ndarray) -> int:
        return open_points[0]


class TPEPoints(PointSampler):
    """Proposes points by Optuna's tree-structured Parzen estimator; draws again what is not an open point."""

    DRAWS = 20

    def __init__(self, encoding: Encoding, *, seed: int = 0, first: Iterable[int] = ()) -> None:
        super().__init__(encoding, seed=seed, first=first)
        self.inner = TPESampler(multivariate=True, group=True, seed=seed, n_startup_trials=8)

    def propose(self, study: optuna.Study, trial: Any, seen: list[Seen], open_points: np.ndarray) -> int:
        known, drawn = set(open_points.tolist()), None
        for _ in range(self.DRAWS):
            search_space = self.inner.infer_relative_search_space(study, trial)
            values = self.inner.sample_relative(study, trial, search_space)
            drawn = self._place(values) if values else None
            if drawn in known:
                return drawn
        if drawn is None:
            return self.random.choice(open_points)
        x = self.encoding.coordinates
        return open_points[np.abs(x[open_points] - x[drawn]).sum(axis=1).argmin()]

    def _place(self, values: Mapping[str, Any]) -> int | None:
        """Returns the place of the point that Optuna's values say; None if they say none."""
        point: dict[str, Any] = {}
        for symbol in self.space.symbols.values():
            if symbol.is_active(point) and symbol.name in values:
                value = values[symbol.name]
                point[symbol.name] = sorted(symbol.values)[value] if symbol.ordered else value
        return self.space.place(point)


class ModelPoints(PointSampler):
    """Proposes the point of the largest expected improvement, by a Gaussian process on the ordered grid.

    The process models the logarithm of the score; a second one models which points fit. A few points far from each
    other come first.
    """

    FIT_LENGTH = 0.6

    def propose(self, study: Any, trial: Any, seen: list[Seen], open_points: np.ndarray) -> int:
        x = self.encoding.coordinates
        good = [one for one in seen if one.score is not None]
        if len(good) < 2 or len(seen) < 3 + x.shape[1] // 2:
            return self._far(seen, open_points)
        scores = np.log([one.score for one in good])
        places = [one.place for one in good]
        slow = [one.place for one in seen if one.outcome == "timeout"]
        values = np.concatenate([scores, np.full(len(slow), scores.min())])
        mean, std = GaussianProcess(x[places + slow], values).predict(x[open_points])
        gain = expected_improvement(mean, std, scores.max())
        return open_points[(gain * self._fits(seen, open_points)).argmax()]

    def _fits(self, seen: list[Seen], open_points: np.ndarray) -> np.ndarray:
        """Returns the probability that a point neither runs out of memory nor is refused; crashes do not count."""
        x = self.encoding.coordinates
        known = [one for one in seen if one.outcome != "crash"]
        labels = np.array([1.0 if one.outcome in ("ok", "timeout") else -1.0 for one in known])
        if labels.min() == 1.0:
            return np.ones(len(open_points))
        process = GaussianProcess(x[[one.place for one in known]], labels, [self.FIT_LENGTH] * x.shape[1])
        mean, std = process.predict(x[open_points])
        likely = normal_cdf(mean / np.maximum(std, 0.2))
        for one in known:
            if one.outcome == "ok":
                likely[self.encoding.must_fit(one.place)[open_points]] = 1.0
        return likely

    def _far(self, seen: list[Seen], open_points: np.ndarray) -> int:
        """Returns an open point that is far from all tried ones, and not at the rim; a random one at first."""
        x = self.encoding.coordinates
        if not seen:
            return self.random.choice(open_points)
        tried = x[[one.place for one in seen]]
        distance = np.abs(x[open_points][:, None, :] - tried[None, :, :]).sum(axis=2).min(axis=1)
        rim = np.abs(x[open_points] - 0.5).max(axis=1)
        return open_points[(distance - rim + 1e-6 * self.random.random(len(open_points))).argmax()]


SAMPLERS: dict[str, type[PointSampler]] = {"model": ModelPoints, "tpe": TPEPoints, "grid": GridPoints}
