"""Numbers that code draws and then asks for: by them it decides whether it calls a layer (``layerdrop``)."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from typing import Any

import torch

from megasched.analysis.recording.operators import draws

_ASKS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
# Of numbers in [0, 1): none is below zero.
_BELOW = (torch.ops.aten.lt.Scalar, torch.ops.aten.le.Scalar)


class PythonDraws:
    """Follows draws of Python's own generator and of numpy's, whose numbers no operation shows.

    Generators that code makes for itself (``random.Random()``, ``numpy.random.default_rng()``) are not seen.
    """

    def __init__(self) -> None:
        self._states = _states()

    def drawn(self) -> bool:
        """Whether there were any since this was last asked."""
        before, self._states = self._states, _states()
        return before != self._states


def _states() -> tuple[Any, ...]:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return (random.getstate(),)
    kind, keys, *rest = numpy.random.get_state()
    return random.getstate(), kind, keys.tobytes(), *rest


class Chance:
    """Follows through a run what is made of drawn numbers alone."""

    def __init__(self) -> None:
        self._drawn: dict[int, torch.Tensor] = {}  # held, so that no other tensor gets the id

    def asks(self, func: Any, args: tuple[Any, ...], operands: Sequence[torch.Tensor]) -> bool:
        """Whether the operation gives Python a number, or a truth, that was drawn."""
        return func in _ASKS and any(id(tensor) in self._drawn for tensor in operands)

    def follow(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        operands: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
    ) -> None:
        """Notes what an operation has made."""
        if func in _BELOW and args[1] <= 0:
            return
        if all(id(tensor) in self._drawn for tensor in operands) and (operands or draws(func, args, kwargs)):
            self._drawn.update((id(tensor), tensor) for tensor in outputs)
