"""Defines the call of an operator with cut tensors, as rules get it."""

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
    """Reports that an operation can't be done part by part.

    Args:
        met: tensors that are whole where others are cut, and the cuts with which the operation could be done.
    """

    def __init__(self, *met: tuple[torch.Tensor, ShardDim]) -> None:
        super().__init__()
        self.met = met


class NoRule(NeedsWhole):
    """Reports an operation without a rule, which is taken for one that needs the whole."""


class OpCall:
    """Describes an operator's arguments and outputs; shapes are those of the whole.

    Attributes:
        operands: the tensors among its arguments.
        outputs: the tensors that it returned.
        cut: the operands that are cut, and how.
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

    @cached_property
    def arguments(self) -> dict[str, Any]:
        """Returns all arguments by the names of the schema."""
        return arguments_of(self.func, self._args, self._kwargs)

    def along(self, tensor: Any) -> ShardDim | None:
        """Returns how a tensor is cut; None for a whole tensor, and for any other value."""
        return self._along(tensor) if isinstance(tensor, torch.Tensor) else None

    def dim(self, tensor: torch.Tensor) -> int:
        """Returns the dimension in the call's ``dim`` argument, counted from the left."""
        return int(self.arguments["dim"]) % tensor.dim()

    def dims(self, tensor: torch.Tensor) -> list[int]:
        """Returns all dimensions in the call's arguments, or those of the tensor where there are none."""
        told = self.arguments.get("dim", self.arguments.get("dims"))
        if told is None or told == []:
            return list(range(tensor.dim()))
        return [dim % tensor.dim() for dim in (told if isinstance(told, list | tuple) else [told])]

    def only(self) -> tuple[torch.Tensor, ShardDim]:
        """Returns the tensor that the operator works on, and its cut, where no other tensor is cut.

        Raises:
            NeedsWhole: another tensor is cut, too, or instead.
        """
        (tensor, along), *others = self.cut
        if others or tensor is not self.arguments.get("self", self.arguments.get("input", tensor)):
            raise NeedsWhole
        return tensor, along

    def require_same(self, tensors: Sequence[torch.Tensor], along: ShardDim, out: torch.Tensor) -> None:
        """Checks that whole tensors are constant along the cut dimension of ``out``.

        With dimensions aligned at the right, they must have size 1 there, or be expanded. An expanded tensor was
        made as large as another one, and on a rank it is as large as that one is there.

        Raises:
            NeedsWhole: a tensor is not constant; says how it would have to be cut.
        """
        met = []
        for tensor in tensors:
            dim = along.dim - out.dim() + tensor.dim()
            differs = dim >= 0 and tensor.shape[dim] > 1 and tensor.stride(dim) != 0
            if differs and self._along(tensor) is None:
                met.append((tensor, replace(along, dim=dim)))
        if met:
            raise NeedsWhole(*met)
