"""Traces functions on tensors without values, to run their operations box by box later."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from megasched.errors import CheckpointError
from megasched.weights.lazy import (
    Box,
    Composed,
    Computed,
    Concatenated,
    LazyTensor,
    Narrowed,
    Squeezed,
    Stacked,
    Transposed,
    whole,
)

# Of tensors that do not fit their like, so many are named.
NAMED = 3

Function = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]


def noted(function: Function, tensors: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    """Returns the function's results for these tensors, to be read box by box.

    A result of operations that can't run box by box is computed from the whole tensors each time it is read.

    Args:
        function: from named tensors to named tensors; it looks at no value.

    Raises:
        CheckpointError: the function can't handle tensors of these shapes.
    """
    notes = _Notes()
    given = {name: notes.stand_in(tensor) for name, tensor in tensors.items()}
    try:
        with notes:
            found = function(given)
    except (RuntimeError, ValueError) as error:
        raise CheckpointError(_odd_one_out(list(tensors.values()), error)) from error
    result: dict[str, LazyTensor] = {}
    for name, stand_in in found.items():
        made = notes.of(stand_in)
        if made is None:
            compute = partial(_compute, function, tensors, name)
            made = Computed(tuple(tensors.values()), compute, tuple(stand_in.shape))
        result[name] = made
    return result


def noted_once(function: Function, tensors: Mapping[str, LazyTensor]) -> Callable[[], dict[str, LazyTensor]]:
    """Returns a function that calls ``noted`` once, when needed, as it opens files to read shapes."""
    return cache(partial(noted, function, tensors))


@dataclass(frozen=True)
class Deferred(Composed):
    """Represents one of the results of ``noted_once``; its sources are those of all of these results."""

    found: Callable[[], dict[str, LazyTensor]]
    name: str

    @property
    def shape(self) -> tuple[int, ...]:
        return self.found()[self.name].shape

    @property
    def dtype(self) -> torch.dtype:
        return self.found()[self.name].dtype

    @property
    def where(self) -> str:
        return self.found()[self.name].where

    def read(self, box: Box) -> torch.Tensor:
        return self.found()[self.name].read(box)


class _Notes(TorchFunctionMode):
    """Keeps the composition of each tensor that is computed from stand-ins."""

    def __init__(self) -> None:
        super().__init__()
        # With the tensor, so that its id stays its own.
        self._made: dict[int, tuple[torch.Tensor, LazyTensor]] = {}

    def stand_in(self, tensor: LazyTensor) -> torch.Tensor:
        """Returns a tensor without values that stands in for a lazy one."""
        empty = torch.empty(tensor.shape, device="meta")
        self._note(empty, tensor)
        return empty

    def of(self, tensor: Any) -> LazyTensor | None:
        """Returns the composition of a tensor, or None if it is unknown."""
        return self._made.get(id(tensor), (None, None))[1]

    def _note(self, tensor: torch.Tensor, made: LazyTensor) -> None:
        self._made[id(tensor)] = (tensor, made)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        note = getattr(self, f"_{getattr(func, '__name__', '')}", None)
        if note is not None:
            note(result, *args, **(kwargs or {}))
        return result

    def _stack(self, result: torch.Tensor, tensors: Sequence[torch.Tensor], dim: int = 0) -> None:
        self._put_together(Stacked, result, tensors, dim)

    def _cat(self, result: torch.Tensor, tensors: Sequence[torch.Tensor], dim: int = 0) -> None:
        self._put_together(Concatenated, result, tensors, dim)

    def _put_together(self, kind: Any, result: torch.Tensor, tensors: Sequence[torch.Tensor], dim: int) -> None:
        parts = [self.of(tensor) for tensor in tensors]
        if None not in parts:
            self._note(result, kind(parts, dim % result.ndim))

    def _chunk(self, result: Sequence[torch.Tensor], tensor: torch.Tensor, count: Any, dim: int = 0) -> None:
        base = self.of(tensor)
        if base is None:
            return
        lengths = [piece.shape[dim] for piece in result]
        for piece, length, end in zip(result, lengths, accumulate(lengths), strict=True):
            self._note(piece, Narrowed(base, dim % tensor.ndim, end - length, length))

    _split = _chunk

    def _squeeze(self, result: torch.Tensor, tensor: torch.Tensor, dim: int) -> None:
        base = self.of(tensor)
        if base is not None:
            self._note(result, Squeezed(base, dim % tensor.ndim) if result.ndim < tensor.ndim else base)

    def _transpose(self, result: torch.Tensor, tensor: torch.Tensor, dim0: int, dim1: int) -> None:
        base = self.of(tensor)
        if base is not None:
            self._note(result, Transposed(base, dim0 % tensor.ndim, dim1 % tensor.ndim))

    def _contiguous(self, result: torch.Tensor, tensor: torch.Tensor) -> None:
        base = self.of(tensor)
        if base is not None:
            self._note(result, base)


def _odd_one_out(tensors: Sequence[LazyTensor], error: Exception) -> str:
    usual, _ = Counter(tensor.shape for tensor in tensors).most_common(1)[0]
    odd = [f"{tensor.where} has shape {list(tensor.shape)}" for tensor in tensors if tensor.shape != usual]
    like = next(tensor for tensor in tensors if tensor.shape == usual)
    named = "; ".join([*odd[:NAMED], f"{like.where} has {list(usual)}"])
    return f"{named}: transformers can't make one parameter of such tensors: {error}"


def _compute(function: Function, tensors: Mapping[str, LazyTensor], name: str) -> torch.Tensor:
    return function({key: tensor.read(whole(tensor.shape)) for key, tensor in tensors.items()})[name]
