"""Defines tensors that are read on request, one box at a time: stored tensors, and compositions of them."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch

from megasched.errors import CheckpointError
from megasched.reading.safetensors_file import open_safetensors
from megasched.weights.hf.safetensors_files import describe

# A half-open range along each dimension.
Box = tuple[tuple[int, int], ...]

# Read and written at once. Memory of this size is used again and again; of more, the C library would ask the
# system for new pages each time, which takes longer than to copy the values.
BLOCK = 8 << 20
# Tensors from this size on have pages of their own.
OWN_PAGES = 1 << 20


class LazyTensor(Protocol):
    """Represents a tensor of which only the requested parts are read."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Returns the shape of the whole tensor, without reading values unless an operation has to run for it."""

    @property
    def dtype(self) -> torch.dtype:
        """Returns the stored dtype."""

    @property
    def where(self) -> str:
        """Returns the file and name, for messages."""

    def read(self, box: Box) -> torch.Tensor:
        """Returns the part in the box on the CPU, in the stored dtype; it may be a view of a mapped file.

        Raises:
            CheckpointError: a file can't be read.
        """

    def leaves(self) -> Iterator[Leaf]:
        """Yields the stored tensors that it is made of."""


class Leaf(LazyTensor, Protocol):
    """Represents a tensor that is stored unchanged."""

    @property
    def key(self) -> str:
        """Returns its stored name."""


def whole(shape: Sequence[int]) -> Box:
    """Returns the box that covers a whole tensor."""
    return tuple((0, length) for length in shape)


def blocks(shape: Sequence[int], itemsize: int, limit: int = BLOCK) -> Iterator[Box]:
    """Yields boxes of at most ``limit`` bytes that cover a tensor in the order of its values in memory."""
    if prod(shape) * itemsize <= limit or not shape:
        yield tuple((0, length) for length in shape)
        return
    row = prod(shape[1:]) * itemsize
    if row > limit:
        for index in range(shape[0]):
            for box in blocks(shape[1:], itemsize, limit):
                yield ((index, index + 1), *box)
        return
    step = limit // row
    rest = tuple((0, length) for length in shape[1:])
    for start in range(0, shape[0], step):
        yield ((start, min(start + step, shape[0])), *rest)


def zeros(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Returns zeros on the CPU; large ones in their own pages, which are returned to the system when freed.

    The C library's heap keeps the holes that pieces of parameters leave once they are joined: measurements showed
    up to half as much memory again as the parameters.
    """
    size = prod(shape) * dtype.itemsize
    if size < OWN_PAGES:
        return torch.zeros(shape, dtype=dtype)
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype, count=prod(shape)).view(shape)


def refuse_nan(values: torch.Tensor, where: str) -> None:
    """Raises CheckpointError if a value is NaN; ``where`` describes the values for the message."""
    if not values.is_floating_point() or values.itemsize == 1 or not values.numel():
        return  # torch has no sum and no order of 8-bit floats
    # A sum is NaN if a value is, and sooner there than the largest. But infinities of both signs give NaN too, and
    # values that do not lie one after the other are copied to float32 first.
    if values.is_contiguous() and not values.sum().isnan():
        return
    if values.amax().isnan():
        raise CheckpointError(
            f"{where} has NaN in it: training would give NaN from its first step on; the file is damaged, or "
            "comes from a run that diverged"
        )


def cast(values: torch.Tensor, dtype: torch.dtype, where: str) -> torch.Tensor:
    """Returns values in another dtype; ``where`` describes them for the message.

    Raises:
        CheckpointError: one is too large for it, and would be infinite.
    """
    found = values.to(dtype)
    if dtype != values.dtype and dtype.is_floating_point and found.isinf().any():
        lost = values[found.isinf() & values.isfinite()]
        if lost.numel():
            largest = f"the largest value of {str(dtype).removeprefix('torch.')} is {torch.finfo(dtype).max:g}"
            raise CheckpointError(f"{where} has {float(lost[0]):g} in it, and {largest}: choose another dtype")
    return found


@dataclass(frozen=True)
class Stored:
    """Represents a tensor of a safetensors file, which is open only during reads."""

    path: Path
    key: str

    @cached_property
    def shape(self) -> tuple[int, ...]:
        return describe(self.path, self.key)[0]

    @cached_property
    def dtype(self) -> torch.dtype:
        return describe(self.path, self.key)[1]

    @property
    def where(self) -> str:
        return f"{self.path}: tensor {self.key}"

    def read(self, box: Box) -> torch.Tensor:
        slices = [
            slice(None) if (start, stop) == (0, length) else slice(start, stop)
            for (start, stop), length in zip(box, self.shape, strict=True)
        ]
        while slices and slices[-1] == slice(None):
            slices.pop()
        with open_safetensors(self.path, self.key) as file:
            values = file.get_slice(self.key)[tuple(slices)] if slices else file.get_tensor(self.key)
        refuse_nan(values, self.where)
        return values

    def leaves(self) -> Iterator[Leaf]:
        yield self


@dataclass(frozen=True)
class Composed:
    """Serves as the base of tensors that are made of several others.

    Attributes:
        sources: the others; none of what the model's class computes.
    """

    sources: Sequence[LazyTensor]

    @property
    def dtype(self) -> torch.dtype:
        return self.sources[0].dtype

    @property
    def where(self) -> str:
        leaves = list(self.leaves())
        if not leaves:
            return "a value of the model's class"
        return leaves[0].where + (f" and {len(leaves) - 1} more" if len(leaves) > 1 else "")

    def leaves(self) -> Iterator[Leaf]:
        for source in self.sources:
            yield from source.leaves()


@dataclass(frozen=True)
class View:
    """Serves as the base of views of another tensor.

    Attributes:
        base: the other tensor.
    """

    base: LazyTensor

    @property
    def dtype(self) -> torch.dtype:
        return self.base.dtype

    @property
    def where(self) -> str:
        return self.base.where

    def leaves(self) -> Iterator[Leaf]:
        return self.base.leaves()


class Tied(Composed):
    """Represents a tensor that is stored several times, with equal values."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.sources[0].shape

    @property
    def where(self) -> str:
        return self.sources[0].where

    def read(self, box: Box) -> torch.Tensor:
        """Reads a box from each, and compares them; see ``LazyTensor.read``.

        Raises:
            CheckpointError: they differ.
        """
        first = self.sources[0].read(box)
        for other in self.sources[1:]:
            if other.shape != self.shape or not torch.equal(first, other.read(box)):
                raise CheckpointError(
                    f"{self.where} and {other.where} are one parameter of the definition but differ; "
                    "if they should not be tied, set tie_word_embeddings=false in the config"
                )
        return first


@dataclass(frozen=True)
class Stacked(Composed):
    """Stacks tensors of one shape along a new dimension, like ``torch.stack``."""

    dim: int

    @property
    def shape(self) -> tuple[int, ...]:
        first = self.sources[0].shape
        return (*first[: self.dim], len(self.sources), *first[self.dim :])

    def read(self, box: Box) -> torch.Tensor:
        start, stop = box[self.dim]
        rest = (*box[: self.dim], *box[self.dim + 1 :])
        if start == stop:  # a rank whose range lies in the padding alone
            return torch.empty([stop - start for start, stop in box], dtype=self.dtype)
        return torch.stack([source.read(rest) for source in self.sources[start:stop]], dim=self.dim)


@dataclass(frozen=True)
class Concatenated(Composed):
    """Concatenates tensors along a dimension, like ``torch.cat``."""

    dim: int

    @property
    def shape(self) -> tuple[int, ...]:
        shapes = [source.shape for source in self.sources]
        length = sum(shape[self.dim] for shape in shapes)
        return (*shapes[0][: self.dim], length, *shapes[0][self.dim + 1 :])

    def read(self, box: Box) -> torch.Tensor:
        lengths = [source.shape[self.dim] for source in self.sources]
        start, stop = box[self.dim]
        pieces = []
        for source, length, end in zip(self.sources, lengths, accumulate(lengths), strict=True):
            first, last = max(start - (end - length), 0), min(stop - (end - length), length)
            if first < last:
                pieces.append(source.read((*box[: self.dim], (first, last), *box[self.dim + 1 :])))
        if not pieces:  # a rank whose range lies in the padding alone
            pieces = [self.sources[0].read((*box[: self.dim], (0, 0), *box[self.dim + 1 :]))]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=self.dim)


@dataclass(frozen=True)
class Narrowed(View):
    """Restricts another tensor to a range along one dimension, like ``torch.narrow``."""

    dim: int
    start: int
    length: int

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.base.shape[: self.dim], self.length, *self.base.shape[self.dim + 1 :])

    def read(self, box: Box) -> torch.Tensor:
        start, stop = box[self.dim]
        moved = (start + self.start, stop + self.start)
        return self.base.read((*box[: self.dim], moved, *box[self.dim + 1 :]))


@dataclass(frozen=True)
class Squeezed(View):
    """Removes one dimension of size 1 from another tensor."""

    dim: int

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.base.shape[: self.dim], *self.base.shape[self.dim + 1 :])

    def read(self, box: Box) -> torch.Tensor:
        return self.base.read((*box[: self.dim], (0, 1), *box[self.dim :])).squeeze(self.dim)


@dataclass(frozen=True)
class Transposed(View):
    """Exchanges two dimensions of another tensor."""

    dim0: int
    dim1: int

    def _exchange(self, of: Sequence[Any]) -> tuple[Any, ...]:
        exchanged = list(of)
        exchanged[self.dim0], exchanged[self.dim1] = exchanged[self.dim1], exchanged[self.dim0]
        return tuple(exchanged)

    @property
    def shape(self) -> tuple[int, ...]:
        return self._exchange(self.base.shape)

    def read(self, box: Box) -> torch.Tensor:
        return self.base.read(self._exchange(box)).transpose(self.dim0, self.dim1)


@dataclass(frozen=True)
class Computed(Composed):
    """Computes a tensor from whole tensors by a function that can't run box by box.

    Attributes:
        compute: returns the tensor; it reads all its inputs, each time.
    """

    compute: Callable[[], torch.Tensor]
    shape: tuple[int, ...]

    @cached_property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        return self.compute().dtype

    def read(self, box: Box) -> torch.Tensor:
        values = self.compute()
        part = values[tuple(slice(start, stop) for start, stop in box)]
        return part if part.shape == values.shape else part.clone()  # a view would hold the whole
