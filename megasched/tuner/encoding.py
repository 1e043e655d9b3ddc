"""The points of a space as numbers, and what one that ran, or ran out of memory, says of others."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from megasched.tuner.space import Space

INACTIVE = -1


class Encoding:
    """A space's points as arrays, in the order of ``space.points``.

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
        """[n, d]; an ordered symbol is one axis from 0 to 1, evenly spaced, any other one axis a value; where
        a symbol can be inactive, that is an axis of its own."""
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
        """[n] bool: which points need at least as much memory as this one, itself included.

        Those that are at least as large in every symbol with which memory grows, at most as large where it
        shrinks, and equal in all others.
        """
        return self._beyond(at, 1)

    def must_fit(self, at: int) -> np.ndarray:
        """[n] bool: which points need at most as much memory as this one, itself included."""
        return self._beyond(at, -1)

    def _beyond(self, at: int, direction: int) -> np.ndarray:
        signs = {"grows": 1, "shrinks": -1, None: 0}
        sign = direction * np.array([signs[symbol.memory] for symbol in self.space.symbols.values()])
        here = self.codes[at]
        alike = ((self.codes == INACTIVE) == (here == INACTIVE)).all(axis=1)
        apart, free = self.codes - here, sign != 0
        return alike & (apart[:, ~free] == 0).all(axis=1) & (apart[:, free] * sign[free] >= 0).all(axis=1)
