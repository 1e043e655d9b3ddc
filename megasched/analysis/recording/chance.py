"""Follows random numbers that code draws and then asks for, for example to skip a layer (``layerdrop``)."""

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
    """Detects draws from Python's global generator and numpy's, which no torch operation shows.

    Generators that code makes for itself (``random.Random()``, ``numpy.random.default_rng()``) are not seen.
    """

    def __init__(self) -> None:
        self._states = _states()

    def drawn(self) -> bool:
        """Returns whether there were any draws since the last call."""
        before, self._states = self._states, _states()
        return before != self._states


def _states() -> tuple[Any, ...]:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return (random.getstate(),)
    kind, keys, *rest = numpy.random.get_state()
    return random.getstate(), kind, keys.tobytes(), *rest


class Chance:
    """Follows the tensors in a run that are made of drawn numbers alone."""

    def __init__(self) -> None:
        self._drawn: dict[int, torch.Tensor] = {}  # held, so that no other tensor gets the id

    def asks(self, func: Any, args: tuple[Any, ...], operands: Sequence[torch.Tensor]) -> bool:
        """Returns whether the operation gives Python a drawn number, or a truth value made of one."""
        return func in _ASKS and any(id(tensor) in self._drawn for tensor in operands)

    def follow(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        operands: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
    ) -> None:
        """Notes the outputs of an operation that draws, or that takes drawn numbers alone."""
        if func in _BELOW and args[1] <= 0:
            return
        if all(id(tensor) in self._drawn for tensor in operands) and (operands or draws(func, args, kwargs)):
            self._drawn.update((id(tensor), tensor) for tensor in outputs)
