"""Tensors that code makes of nothing: of sizes, of numbers, of lists.

They are the same wherever a sequence is cut, as long as they do not go by the length that the code sees:
``ones(s)`` has a one for each token, and its sum is another number on a part of the sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from megasched.analysis.recording.numbers import CONSTANTS, numbers_in

# Give the elements of what they get, in another order or number.
VIEWS = frozenset(
    (
        *("slice", "select", "narrow", "view", "_unsafe_view", "expand", "reshape", "alias", "detach", "repeat"),
        *("unsqueeze", "squeeze", "transpose", "permute", "t", "clone", "_to_copy", "lift_fresh"),
    )
)


class Made(NamedTuple):
    """How a tensor came about.

    Attributes:
        path: the module whose code made it.
        name: the operation that did.
        uniform: its elements are all the same, so that it does not matter how many there are.
        told: something that is equal for tensors that were made in the same way; of one that is not uniform with
            its sizes.
    """

    path: str
    name: str
    uniform: bool
    told: int


class MadeOfNothing:
    """Follows such tensors through a run."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[torch.Tensor, Made]] = {}  # held, so that no other tensor gets the id

    def of(self, tensor: torch.Tensor) -> Made | None:
        """How a tensor was made; None for one that is no such one."""
        found = self._made.get(id(tensor))
        return None if found is None else found[1]

    def meets(self, ids: Sequence[int]) -> bool:
        """Whether tensors of these ids are among them."""
        return not self._made.keys().isdisjoint(ids)

    def follow(
        self,
        path: str,
        name: str,
        operands: Sequence[Made],
        shapes: Sequence[torch.Size],
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None,
        outputs: Sequence[torch.Tensor],
        *,
        pointwise: bool,
    ) -> None:
        """Notes what an operation on nothing but such tensors gives.

        Args:
            path: the module whose code has it.
            operands, shapes: how they were made, and what shapes they have; none for what is made of nothing.
            pointwise: it works on single elements.
        """
        uniform = all(one.uniform for one in operands)
        if name in CONSTANTS:
            uniform, told = True, (name, *numbers_in(args, kwargs))
        elif operands and uniform and (pointwise or name in VIEWS):
            numbers = numbers_in(args, kwargs) if pointwise else ()
            told = (name, *numbers, *(one.told for one in operands))
        else:
            sizes = (*map(tuple, shapes), *(tuple(tensor.shape) for tensor in outputs))
            uniform, told = False, (name, *numbers_in(args, kwargs), *sizes, *(one.told for one in operands))
        first = next((one for one in operands if not one.uniform), None) or next(iter(operands), None)
        origin = (path, name) if first is None else (first.path, first.name)
        for tensor in outputs:
            self._made[id(tensor)] = tensor, Made(*origin, uniform, hash(told))

    def forget(self, tensors: Sequence[torch.Tensor]) -> None:
        """These have been written to, with something that was not made so."""
        for tensor in tensors:
            self._made.pop(id(tensor), None)

    def let_go(self) -> None:
        """Holds no tensors any more."""
        self._made.clear()
