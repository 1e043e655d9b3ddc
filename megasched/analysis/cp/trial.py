"""Defines the sizes and arguments of a trial call for context parallelism, and finds what masks are made of."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import nn

from megasched.errors import Problem
from megasched.language.tensor_types import ShardDim

REMEDY = "run it without --context-parallel-size"
# Module path, operation, and the numbers it got beside tensors.
Numbers = tuple[Any, ...]


class Origin(NamedTuple):
    """Says where a value came about that depends on more than its own token.

    Attributes:
        region: the module that would have to see the whole sequence; None where there is none.
        path: the module that ran.
        why: what it did.
    """

    region: str | None
    path: str
    why: str


class RunningCall(NamedTuple):
    """Represents a module call that is in progress."""

    path: str
    args: Any
    kwargs: Any


def takes_positions(model: nn.Module) -> bool:
    """Returns whether a definition's forward takes ``position_ids``."""
    return "position_ids" in inspect.signature(type(model).forward).parameters


def trial_sizes(model: nn.Module, size: int, at_least: int = 0) -> tuple[int, tuple[int, int]]:
    """Returns a batch size, and two lengths of a part of a sequence that no other dimension has.

    Args:
        at_least: lower bound of both lengths.
    """
    taken = {dim for tensor in (*model.parameters(), *model.buffers()) for dim in tensor.shape}
    config = getattr(model, "config", None)
    taken |= {value for value in vars(config).values() if isinstance(value, int)} if config is not None else set()
    batch = 3 if size == 2 else 2
    begin = at_least // 2 + 1
    more = range(begin, begin + 64) if at_least else ()
    primes = (5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83, 89, 97)
    factors = (1, batch, size, batch * size)
    free = [2 * prime for prime in more or primes if not taken & {2 * prime * factor for factor in factors}]
    first, second = (*free, 2 * 101, 2 * 103)[:2]
    return batch, (first, second)


def dims_as_long(tensor: torch.Tensor, batch: int, length: int) -> list[ShardDim]:
    """Returns the dimensions of a tensor that have that length, or are batch and length flattened."""
    outer = {length: 1, batch * length: batch}
    return [ShardDim(dim, outer[size]) for dim, size in enumerate(tensor.shape) if size in outer]


def closed_over(function: Any, seen: set[int] | None = None) -> Iterator[torch.Tensor]:
    """Yields the tensors that a function of indices was made with."""
    seen = set() if seen is None else seen
    if id(function) in seen:
        return
    seen.add(id(function))
    if isinstance(function, torch.Tensor):
        yield function
        return
    inner = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    inner += [getattr(function, "__self__", None), *getattr(function, "args", ()), getattr(function, "func", None)]
    inner += list(function) if isinstance(function, list | tuple) else []
    for value in inner:
        if value is not None:
            yield from closed_over(value, seen)


def numbers_of_length(run: Sequence[Numbers], other: Sequence[Numbers]) -> list[Problem]:
    """Finds a number that a definition computes, outside of tensors, from the length of its part of the sequence.

    Args:
        run, other: element-wise operations, and those on nothing, of two runs that differ in the length alone.

    Returns:
        One problem, or none.
    """
    for one, two in zip_longest(run, other):
        if one != two:
            path, name, *_ = one or two
            what = f"context parallelism: {name} goes by the length of the sequence, of which a rank sees a part"
            return [Problem(what, path, remedy=REMEDY)]
    return []
