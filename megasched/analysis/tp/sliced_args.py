"""Finds constant arguments that are whole on every TP rank and meet cut tensors, so that each rank takes its part.

ALiBi's biases are one: the model makes them for all heads before its layers, and attention adds them to its
logits. Where such a tensor stems from an argument of the module around, the module can get a part of that
argument. How to cut the argument follows from the module's own operations on it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import torch

from megasched.analysis.rules.follow import follow
from megasched.analysis.rules.op_call import NeedsWhole
from megasched.language.tensor_types import ShardDim


class ArgRef(NamedTuple):
    """Identifies an argument of a module by its position (int) or name (str) in the call."""

    path: str
    slot: int | str


class ArgSlice(NamedTuple):
    """Describes the part of an argument that each rank takes.

    Attributes:
        dim: the dimension that is cut.
        count: number of units (heads) shared out along it; its size may be a multiple of them: [b*heads, ...].
        columns: the column linears whose outputs it meets.
    """

    dim: int
    count: int
    columns: frozenset[str] = frozenset()

    def along(self, tensor: torch.Tensor) -> ShardDim:
        """Returns how such an argument is cut."""
        return ShardDim(self.dim, tensor.shape[self.dim] // self.count)


class SlicedArgs:
    """Learns from one run which arguments could be cut.

    Attributes:
        known: arguments that are cut in this run.
        wanted: arguments that should be cut in the next run, too.
    """

    def __init__(self, known: Mapping[ArgRef, ArgSlice]) -> None:
        self.known = known
        self.wanted: dict[ArgRef, ArgSlice] = {}
        # id of a tensor -> what could be taken of an argument that it stems from -> how the tensor is cut then
        self._ways: dict[int, dict[tuple[ArgRef, ArgSlice], ShardDim]] = {}

    def offer(self, argument: ArgRef, tensor: torch.Tensor) -> None:
        """Offers a constant argument of a module, of which a rank may take a part."""
        found = [ArgSlice(dim, count) for dim, size in enumerate(tensor.shape) for count in _counts(size)]
        self._ways[id(tensor)] = {(argument, part): part.along(tensor) for part in found}

    def pass_on(self, source: torch.Tensor, alias: torch.Tensor) -> None:
        """Copies the possible cuts of a tensor to its alias."""
        if id(source) in self._ways:
            self._ways[id(alias)] = dict(self._ways[id(source)])

    def follow(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        operands: Iterable[torch.Tensor],
        outputs: list[torch.Tensor],
    ) -> None:
        """Follows the offered constants through an operation on whole tensors."""
        for tensor in operands:
            for way, place in tuple(self._ways.get(id(tensor), {}).items()):
                with suppress(NeedsWhole):  # then it can't be cut in this way
                    cut = {id(tensor): place}
                    found = follow(func, args, kwargs, outputs, lambda other, cut=cut: cut.get(id(other)))
                    for output, along in zip(outputs, found, strict=True):
                        if along is not None:
                            self._ways.setdefault(id(output), {})[way] = along

    def want(
        self, met: Iterable[tuple[torch.Tensor, ShardDim]], columns: frozenset[str], around: str | None
    ) -> bool:
        """Asks for arguments to be cut so that tensors made of them are; False where that can't be.

        Args:
            met: whole tensors, and how they would have to be cut.
            columns: the columns whose outputs they meet.
            around: the module whose arguments can be cut.
        """
        found: dict[ArgRef, ArgSlice] = {}
        for tensor, place in met:
            ways = [way for way, along in self._ways.get(id(tensor), {}).items() if along == place]
            if len(ways) != 1:
                return False
            argument, part = ways[0]
            before = found.get(argument) or self.wanted.get(argument) or part
            if argument.path != around or argument in self.known or before[:2] != part[:2]:
                return False
            found[argument] = part._replace(columns=columns | before.columns)
        self.wanted |= found
        return bool(found)


def _counts(size: int) -> list[int]:
    """Returns the numbers of units that can be shared out along a dimension of this size."""
    return [count for count in range(2, size + 1) if size % count == 0]
