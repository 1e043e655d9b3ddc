"""Keeps the number of sequences in the current forward, which flattened tokens do not show."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar
from weakref import WeakSet


class HasBatch:
    """Keeps a number of sequences that layers read while they run.

    Attributes:
        batch: number of sequences in the current forward; set by whoever calls the layers.
    """

    _each: ClassVar[WeakSet[HasBatch]] = WeakSet()

    def __init__(self) -> None:
        self.batch = 1
        HasBatch._each.add(self)


def batches() -> dict[HasBatch, int]:
    """Returns the numbers of sequences of now."""
    return {each: each.batch for each in HasBatch._each}


@contextmanager
def with_batches(sizes: dict[HasBatch, int]) -> Iterator[None]:
    """Runs its body, a part of an earlier forward, with that forward's numbers of sequences."""
    now = batches()
    _set(sizes)
    try:
        yield
    finally:
        _set(now)


def _set(sizes: dict[HasBatch, int]) -> None:
    for each, size in sizes.items():
        each.batch = size
