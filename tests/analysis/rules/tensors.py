"""Tensors that are cut, of any shape."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from megasched.language.tensor_types import ShardDim
from tests.analysis.rules.by_parts import Example

aten = torch.ops.aten
Strategy = Callable[[str], SearchStrategy[Example]]


@dataclass(frozen=True)
class Cut:
    """A tensor, how it is cut, and over how many ranks."""

    tensor: torch.Tensor
    along: ShardDim
    ranks: int

    @property
    def dim(self) -> int:
        return self.along.dim

    @property
    def shape(self) -> list[int]:
        return list(self.tensor.shape)


def numbers(draw: DrawFn, shape: Sequence[int]) -> torch.Tensor:
    """float64 between 0.1 and 0.9, none twice."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    return 0.1 + 0.8 * torch.rand(list(shape), generator=generator, dtype=torch.float64)


def places(draw: DrawFn, shape: Sequence[int], below: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    return torch.randint(below, list(shape), generator=generator)


def some(draw: DrawFn, *values: Any) -> Any:
    return draw(st.sampled_from(values))


def one_dim(draw: DrawFn, tensor: torch.Tensor) -> int:
    """A dimension, counted from either side."""
    dim = draw(st.integers(0, tensor.dim() - 1))
    return dim if draw(st.booleans()) else dim - tensor.dim()


@st.composite
def cuts(
    draw: DrawFn, least: int = 1, most: int = 4, dim: int | None = None, *, packed: bool = True, few: bool = False
) -> Cut:
    """A tensor of any shape that is cut.

    Args:
        least, most: dimensions.
        dim: that is cut; any by default.
        packed: there may be several components, or something outside of the cut.
        few: a component may have fewer heads than there are ranks.
    """
    shape = draw(st.lists(st.integers(1, 3), min_size=least, max_size=most))
    dim = draw(st.integers(0, len(shape) - 1)) if dim is None else dim
    ranks = some(draw, 2, 2, 3)
    kind = some(draw, "plain", *(("outer", "components") if packed else ()), *(("heads",) if few else ()))
    along = ShardDim(dim)
    if kind in ("plain", "outer"):
        along = ShardDim(dim, draw(st.integers(2, 3)) if kind == "outer" else 1)
        shape[dim] = along.outer * ranks * draw(st.integers(1, 2))
    else:
        components = tuple(ranks * draw(st.integers(1, 2)) for _ in range(draw(st.integers(2, 3))))
        heads = (0, *(some(draw, 0, 1) for _ in components[1:])) if kind == "heads" else ()
        along = ShardDim(dim, components=components, heads=heads if any(heads) else ())
        shape[dim] = sum(components)
    return Cut(numbers(draw, shape), along, ranks)


def resized(index: int, shape: Sequence[int]) -> Any:
    """For ``Example.sizes``: the argument is the shape of what it gives."""

    def sizes(found: list[ShardDim | None], ranks: int) -> dict[int, Any]:
        along = found[0]
        assert along is not None
        return {
            index + dim: along.on_rank(size, ranks) if dim == along.dim else size for dim, size in enumerate(shape)
        }

    return sizes


def beside(draw: DrawFn, cut: Cut) -> tuple[torch.Tensor, ShardDim | None]:
    """Another tensor that is broadcast against one that is cut, and how it is cut itself."""
    shape = [1 if draw(st.booleans()) and d != cut.dim else size for d, size in enumerate(cut.shape)]
    how = some(draw, "cut", "cut", "alike", "missing", "whole")
    if how == "alike":
        shape[cut.dim] = 1
    left = draw(st.integers(0, cut.dim)) if how in ("cut", "whole") else 0
    if how == "missing":
        left = cut.dim + 1
    along = (
        ShardDim(cut.dim - left, cut.along.outer, cut.along.components, cut.along.heads) if how == "cut" else None
    )
    return numbers(draw, shape[left:]), along


def unary(cut: Cut, op: Any, kwargs: dict[str, Any] | None = None, args: tuple[Any, ...] = ()) -> Example:
    return Example(op, (cut.tensor, *args), kwargs or {}, {0: cut.along}, ranks=cut.ranks)
