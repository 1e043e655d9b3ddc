"""Defines what one module's code did with its arguments, to be compared with what it does on a rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from megasched.analysis.recording.sites import Site
from megasched.analysis.recording.trees import snapshot
from megasched.definition.module_copy import PLAIN
from megasched.language.tensor_types import ShardDim


class Placed(NamedTuple):
    """Describes a shape, and how it is cut over TP.

    Attributes:
        one_value: number of a tensor that has one value everywhere, which a rank may make in any size; None for
            any other tensor.
    """

    shape: tuple[int, ...]
    along: ShardDim | None = None
    one_value: int | None = None

    def on_rank(self, tp: int) -> tuple[int, ...]:
        if self.along is None:
            return self.shape
        shape = list(self.shape)
        shape[self.along.dim] = self.along.on_rank(shape[self.along.dim], tp)
        return tuple(shape)


@dataclass(frozen=True)
class Argument:
    """Holds a tensor argument of a module."""

    tensor: torch.Tensor
    placed: Placed | None

    def on_rank(self, tp: int, made: Mapping[int, tuple[int, ...]]) -> torch.Tensor:
        shape = None if self.placed is None else self.placed.on_rank(tp)
        if self.placed is not None and self.placed.one_value is not None:
            shape = made.get(self.placed.one_value, shape)
        same = shape is None or shape == tuple(self.tensor.shape)
        return self.tensor if same else torch.empty(shape, dtype=self.tensor.dtype, device="meta")


@dataclass(frozen=True)
class ModuleCall:
    """Describes one call of a module.

    Attributes:
        args, kwargs: its arguments, each tensor an ``Argument``.
        results: outputs of its operations, in their order; None where it is not known how an output is cut.
            Operations of layers inside are left out.
        numbers: numbers on which its operations depend, or of which it makes tensors.
        columns: columns whose output its own code works on.
        layers: path of a layer that it calls -> outputs of that layer, call by call.
        answers: answers to the questions of its code; see ``ScalarAnswers``.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[Placed | None, ...]
    numbers: tuple[tuple[float, ...], ...]
    columns: frozenset[str]
    layers: dict[str, list[Any]] = field(default_factory=dict)
    answers: tuple[tuple[Site, int], ...] = ()

    @property
    def of_one_value(self) -> list[int]:
        """Returns the numbers of tensors that have one value everywhere, in the order of their operations."""
        return [place.one_value for place in self.results if place is not None and place.one_value is not None]

    def arguments(self, tp: int, made: Mapping[int, tuple[int, ...]]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the arguments that one of ``tp`` ranks gets.

        ``made`` has the shapes of tensors that a rank made itself (``one_value``).
        """
        local = lambda leaf: leaf.on_rank(tp, made)  # noqa: E731
        given = torch.utils._pytree.tree_map_only(Argument, local, (self.args, self.kwargs))
        return snapshot(given)

    def signature(self, made: Mapping[int, tuple[int, ...]]) -> tuple[Any, ...]:
        """Returns a key that is equal for calls of like modules that do the same on a rank."""
        leaves, structure = torch.utils._pytree.tree_flatten((self.args, self.kwargs))
        handed = tuple(_handed(leaf, made) for leaf in leaves)
        return handed, str(structure), tuple(map(_unnumbered, self.results)), self.numbers, self.answers


def _unnumbered(place: Placed | None) -> Placed | None:
    return place if place is None or place.one_value is None else place._replace(one_value=0)


def _handed(leaf: Any, made: Mapping[int, tuple[int, ...]]) -> Any:
    """Returns a key that tells an argument from those of other calls; an unknown object equals only itself."""
    if isinstance(leaf, Argument):
        place = leaf.placed
        shape = None if place is None or place.one_value is None else made.get(place.one_value)
        return tuple(leaf.tensor.shape), leaf.tensor.dtype, place and _unnumbered(place), shape
    return (type(leaf), leaf) if type(leaf) in PLAIN else id(leaf)
