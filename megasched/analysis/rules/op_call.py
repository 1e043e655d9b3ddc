"""A call of an operator some of whose tensors are cut, as a rule is handed it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch

from megasched.analysis.recording.meta_call import tensors_in
from megasched.analysis.recording.operators import arguments_of
from megasched.language.tensor_types import ShardDim


class NeedsWhole(Exception):
    """The operation can't be done part by part.

    Args:
        met: tensors that are whole where others are cut, and how they would have to be cut for it to be done.
    """

    def __init__(self, *met: tuple[torch.Tensor, ShardDim]) -> None:
        super().__init__()
        self.met = met


class NoRule(NeedsWhole):
    """Nothing is known of the operation, so that it is taken for one that needs the whole."""


class OpCall:
    """What an operator was called with, and what it gave; shapes are those of the whole.

    Attributes:
        operands: the tensors among its arguments.
        outputs: the tensors that it gave.
        cut: those of the operands that are cut, and how.
    """

    def __init__(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        outputs: list[torch.Tensor],
        along: Callable[[torch.Tensor], ShardDim | None],
    ) -> None:
        self.func, self.outputs = func, outputs
        self._args, self._kwargs, self._along = args, kwargs, along
        self.operands: list[torch.Tensor] = tensors_in((args, kwargs))
        self.cut = [(tensor, found) for tensor in self.operands if (found := along(tensor)) is not None]

    @property
    def name(self) -> str:
        """The operator's name in the schema, without an overload's."""
        return str(self.func.overloadpacket.__name__)

    @cached_property
    def arguments(self) -> dict[str, Any]:
        """All arguments by the names of the schema."""
        return arguments_of(self.func, self._args, self._kwargs)

    def along(self, tensor: Any) -> ShardDim | None:
        """How a tensor is cut; None for one that is whole, and for what is no tensor."""
        return self._along(tensor) if isinstance(tensor, torch.Tensor) else None

    def dim(self, tensor: torch.Tensor) -> int:
        """The dimension that the call is told, counted from the left."""
        return int(self.arguments["dim"]) % tensor.dim()

    def dims(self, tensor: torch.Tensor) -> list[int]:
        """All dimensions that it is told, or those of the tensor where it is told none."""
        told = self.arguments.get("dim", self.arguments.get("dims"))
        if told is None or told == []:
            return list(range(tensor.dim()))
        return [dim % tensor.dim() for dim in (told if isinstance(told, list | tuple) else [told])]

    def only(self) -> tuple[torch.Tensor, ShardDim]:
        """The tensor that the operator works on, and its cut, where that is all that is cut.

        Raises:
            NeedsWhole: others are, too, or instead.
        """
        (tensor, along), *others = self.cut
        if others or tensor is not self.arguments.get("self", self.arguments.get("input", tensor)):
            raise NeedsWhole
        return tensor, along

    def require_same(self, tensors: Sequence[torch.Tensor], along: ShardDim, out: torch.Tensor) -> None:
        """Checks that what is whole is the same along the dimension of ``out`` that is cut, dimensions aligned at
        the right: of size 1 there, or expanded to its size.

        An expanded tensor was made of one as large as another; on a rank it is as large as that one is there.

        Raises:
            NeedsWhole: one is not; says how it would have to be cut.
        """
        met = []
        for tensor in tensors:
            dim = along.dim - out.dim() + tensor.dim()
            differs = dim >= 0 and tensor.shape[dim] > 1 and tensor.stride(dim) != 0
            if differs and self._along(tensor) is None:
                met.append((tensor, replace(along, dim=dim)))
        if met:
            raise NeedsWhole(*met)
