"""Follows tensors that code makes of nothing: of sizes, of numbers, of lists.

They are equal wherever a sequence is cut, unless they depend on the length that the code sees: ``ones(s)`` has a
one for each token, and its sum is another number on a part of the sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from megasched.analysis.recording.numbers import CONSTANTS, numbers_in
from megasched.analysis.recording.tape import Operation

# Give the elements of what they get, in another order or number.
VIEWS = frozenset(
    (
        *("slice", "select", "narrow", "view", "_unsafe_view", "expand", "reshape", "alias", "detach", "repeat"),
        *("unsqueeze", "squeeze", "transpose", "permute", "t", "clone", "_to_copy", "lift_fresh"),
    )
)


class Made(NamedTuple):
    """Describes how a tensor came about.

    Attributes:
        path: the module whose code made it.
        name: the operation that made it.
        uniform: whether all its elements are equal, so that their number does not matter.
        told: a number that is equal for tensors made alike, and of equal sizes unless uniform.
    """

    path: str
    name: str
    uniform: bool
    told: int


class MadeOfNothing:
    """Follows tensors made of nothing through a run."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[torch.Tensor, Made]] = {}  # held, so that no other tensor gets the id

    def of(self, tensor: torch.Tensor) -> Made | None:
        """Returns how a tensor was made; None if it was not made of nothing."""
        found = self._made.get(id(tensor))
        return None if found is None else found[1]

    def meets(self, ids: Sequence[int]) -> bool:
        """Returns whether a tensor with one of these ids was made of nothing."""
        return not self._made.keys().isdisjoint(ids)

    def follow(
        self,
        path: str,
        name: str,
        operands: Sequence[Made],
        operation: Operation,
        *,
        pointwise: bool,
    ) -> None:
        """Notes the outputs of an operation that takes no tensors, or only tensors made of nothing.

        Args:
            path: the module whose code runs it.
            operands: how its operands were made; empty for an operation on nothing.
            pointwise: whether it works on single elements.
        """
        uniform = all(one.uniform for one in operands)
        numbers = numbers_in(operation.args, operation.kwargs)
        if name in CONSTANTS:
            uniform, told = True, (name, *numbers)
        elif operands and uniform and (pointwise or name in VIEWS):
            told = (name, *(numbers if pointwise else ()), *(one.told for one in operands))
        else:
            sizes = [tuple(tensor.shape) for tensor in (*operation.operands, *operation.outputs)]
            uniform, told = False, (name, *numbers, *sizes, *(one.told for one in operands))
        first = next((one for one in operands if not one.uniform), None) or next(iter(operands), None)
        origin = (path, name) if first is None else (first.path, first.name)
        for tensor in operation.outputs:
            self._made[id(tensor)] = tensor, Made(*origin, uniform, hash(told))

    def forget(self, tensors: Sequence[torch.Tensor]) -> None:
        """Stops following tensors that were written to from a tensor not made of nothing."""
        for tensor in tensors:
            self._made.pop(id(tensor), None)

    def let_go(self) -> None:
        """Drops all tensors."""
        self._made.clear()
