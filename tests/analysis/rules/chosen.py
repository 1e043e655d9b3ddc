"""Calls of operators that take elements at indices, or put them there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from tests.analysis.rules.by_parts import Example
from tests.analysis.rules.tensors import aten, cuts, numbers, one_dim, places, some

BY_ELEMENT = frozenset(["gather", "scatter", "scatter_", "scatter_add", "scatter_add_"])


@st.composite
def by_element(draw: DrawFn, name: str) -> Example:
    cut = draw(cuts(least=2))
    x = cut.tensor
    dim = one_dim(draw, x)
    shape = [some(draw, s, draw(st.integers(1, s))) if d != cut.dim else s for d, s in enumerate(x.shape)]
    shape[dim] = x.shape[dim] if dim % x.dim() == cut.dim else draw(st.integers(1, x.shape[dim]))
    index = _distinct(draw, shape, x.shape[dim], dim)
    of_index = some(draw, "cut", "cut", "whole", "expanded")
    known, follows = {0: cut.along}, {}
    if of_index == "cut":
        known[2] = cut.along
    if of_index == "expanded" and dim % x.dim() != cut.dim:
        index = index.narrow(cut.dim, 0, 1).expand(shape)
        follows[2] = cut.along
    if draw(st.integers(0, 5)) == 0:
        del known[0]  # the indices alone are cut
    args: tuple[Any, ...] = (x, dim, index)
    overload = "default"
    if name.startswith("scatter"):
        by_number = name in ("scatter", "scatter_") and draw(st.booleans())
        overload = "value" if by_number else "default" if "add" in name else "src"
        args = (*args, 0.5 if by_number else numbers(draw, shape))
        if not by_number and draw(st.integers(0, 4)):
            known[3] = cut.along
    return Example(getattr(getattr(aten, name), overload), args, {}, known, follows, ranks=cut.ranks)


def _distinct(draw: DrawFn, shape: Sequence[int], below: int, dim: int) -> torch.Tensor:
    """Places along a dimension, none twice: what is put at one twice is not determined."""
    wide = list(shape)
    wide[dim] = below
    return numbers(draw, wide).argsort(dim).narrow(dim, 0, shape[dim])


BY_PLACE = frozenset(["index_add", "index_add_"])


@st.composite
def by_place(draw: DrawFn, name: str) -> Example:
    cut = draw(cuts())
    x = cut.tensor
    dim = one_dim(draw, x)
    shape = list(x.shape)
    shape[dim] = draw(st.integers(1, 3))
    known = {0: cut.along, 3: cut.along}
    if draw(st.integers(0, 3)) == 0:
        del known[some(draw, 0, 3)]
    args = (x, dim, places(draw, [shape[dim]], x.shape[dim]), numbers(draw, shape))
    return Example(getattr(aten, name).default, args, {"alpha": 2.0}, known, ranks=cut.ranks)


@st.composite
def indexed(draw: DrawFn, name: str) -> Example:
    """Indices along other dimensions than the one that is cut, and along that one."""
    cut = draw(cuts())
    x, dim = cut.tensor, 0
    indices: list[torch.Tensor | None] = []
    shape = draw(st.lists(st.integers(1, 3), min_size=1, max_size=2))
    masked = False
    while dim < x.dim():
        how = some(draw, "none", "places", "places", "mask", "end")
        if how == "end" and any(index is not None for index in indices):
            break
        if how == "mask" and not masked and all(index is None for index in indices):
            count = draw(st.integers(1, x.dim() - dim))
            indices.append(numbers(draw, x.shape[dim : dim + count]) > 0.4)
            masked, dim = True, dim + count
            continue
        if how == "places" and not masked:
            own = shape[draw(st.integers(0, len(shape) - 1)) :]
            indices.append(places(draw, own, x.shape[dim]))
        else:
            indices.append(None)
        dim += 1
    if all(index is None for index in indices):
        indices = [places(draw, shape, x.shape[0])]
    return Example(aten.index.Tensor, (x, indices), {}, {0: cut.along}, ranks=cut.ranks)
