"""Fits a Gaussian process to few measurements, in plain numpy: what a point may score, and whether it fits."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

LENGTHS = (0.1, 0.2, 0.4, 0.8, 1.6, 3.2)
NOISES = (1e-4, 1e-3, 1e-2)
SWEEPS = 2


class GaussianProcess:
    """Fits values, which it centres and scales, with a Matern 5/2 kernel.

    The length of each axis, and the noise, are those of a short list that make the values most likely.

    Args:
        x: [n, d] in about 0 to 1.
        y: [n].
        lengths: length of each axis; if None, lengths and noise are searched for.
    """

    def __init__(self, x: np.ndarray, y: np.ndarray, lengths: Sequence[float] | None = None) -> None:
        self.x, self.y = x, y
        self.mean = float(y.mean())
        self.scale = float(y.std()) or 1.0
        self.lengths, self.noise = np.full(x.shape[1], 0.8), NOISES[1]
        if lengths is not None:
            self.lengths = np.asarray(lengths, dtype=float)
        else:
            self._search()
        self._solve()

    def predict(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns mean and standard deviation at [m, d] places."""
        cross = _kernel(x, self.x, self.lengths)
        mean = cross @ self._weights
        left = np.linalg.solve(self._root, cross.T)
        variance = np.maximum(1.0 - (left**2).sum(axis=0), 1e-12)
        return self.mean + self.scale * mean, self.scale * np.sqrt(variance)

    def _search(self) -> None:
        best = self._solve()
        for _ in range(SWEEPS):
            for axis in range(self.x.shape[1]):
                for length in LENGTHS:
                    best = self._try(best, axis=axis, length=length)
            for noise in NOISES:
                best = self._try(best, noise=noise)

    def _try(
        self, best: float, *, axis: int = 0, length: float | None = None, noise: float | None = None
    ) -> float:
        """Keeps a change if it makes the values more likely; returns the likelihood after it."""
        lengths, old_noise = self.lengths.copy(), self.noise
        if length is not None:
            self.lengths[axis] = length
        self.noise = noise or old_noise
        found = self._solve()
        if found > best:
            return found
        self.lengths, self.noise = lengths, old_noise
        return best

    def _solve(self) -> float:
        """Returns the log likelihood of values and lengths; very short and very long ones are less likely."""
        y = (self.y - self.mean) / self.scale
        covariance = _kernel(self.x, self.x, self.lengths) + self.noise * np.eye(len(y))
        self._root = np.linalg.cholesky(covariance)
        half = np.linalg.solve(self._root, y)
        self._weights = np.linalg.solve(self._root.T, half)
        prior = -0.5 * float((np.log(self.lengths / 0.6) ** 2).sum())
        return -0.5 * float(half @ half) - float(np.log(np.diag(self._root)).sum()) + prior


def expected_improvement(mean: np.ndarray, std: np.ndarray, best: float) -> np.ndarray:
    """Returns by how much a normal variable is above the best, on average."""
    z = (mean - best) / std
    density = np.exp(-0.5 * z**2) / math.sqrt(2 * math.pi)
    return (mean - best) * normal_cdf(z) + std * density


def normal_cdf(z: np.ndarray) -> np.ndarray:
    return 0.5 * (1.0 + np.vectorize(math.erf)(z / math.sqrt(2.0)))


def _kernel(a: np.ndarray, b: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    distance = np.sqrt((((a[:, None, :] - b[None, :, :]) / lengths) ** 2).sum(axis=2) * 5.0)
    return (1.0 + distance + distance**2 / 3.0) * np.exp(-distance)
