"""Calls of operators that read a table at indices that are cut, and of some that shape what they take."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from megasched.language.tensor_types import ShardDim
from tests.analysis.rules.by_parts import Example
from tests.analysis.rules.tensors import Cut, aten, cuts, numbers, one_dim, places, some, unary

LOOKED_UP = frozenset(["embedding", "index", "index_select", "gather"])


@st.composite
def looked_up(draw: DrawFn, name: str) -> Example:
    """A table that is whole is read at indices that are cut."""
    cut = draw(cuts(most=1 if name == "index_select" else 3, packed=False))
    if name == "gather":
        return _gathered(draw, cut)
    rows = draw(st.integers(1, 4))
    index = places(draw, cut.shape, rows)
    if name == "embedding":
        table = numbers(draw, [rows, draw(st.integers(1, 3))])
        return Example(aten.embedding.default, (table, index), {}, {1: cut.along}, ranks=cut.ranks)
    shape = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    dim = draw(st.integers(0, len(shape) - 1))
    shape[dim] = rows
    table = numbers(draw, shape)
    if name == "index_select":
        return Example(aten.index_select.default, (table, dim, index), {}, {2: cut.along}, ranks=cut.ranks)
    return Example(aten.index.Tensor, (table, [*[None] * dim, index]), {}, {1 + dim: cut.along}, ranks=cut.ranks)


def _gathered(draw: DrawFn, cut: Cut) -> Example:
    """Along the dimension that is cut, too, where the table is whole."""
    dim = one_dim(draw, cut.tensor)
    shape = list(cut.shape)
    shape[dim] = draw(st.integers(1, 4))
    if some(draw, True, False) and dim % len(shape) != cut.dim:  # the table is cut as the indices are
        index = places(draw, cut.shape, shape[dim])
        known = {0: cut.along, 2: cut.along}
        return Example(aten.gather.default, (numbers(draw, shape), dim, index), {}, known, ranks=cut.ranks)
    index = places(draw, cut.shape, shape[dim])
    return Example(aten.gather.default, (numbers(draw, shape), dim, index), {}, {2: cut.along}, ranks=cut.ranks)


SHAPED = frozenset(["repeat", "glu"])


@st.composite
def shaped(draw: DrawFn, name: str) -> Example:
    cut = draw(cuts(least=2))
    x = cut.tensor
    if name == "repeat":
        repeats = draw(st.lists(st.integers(1, 2), min_size=x.dim(), max_size=x.dim() + 1))
        return unary(cut, aten.repeat.default, args=(repeats,))
    dim = one_dim(draw, x)
    along = ShardDim(cut.dim) if dim % x.dim() == cut.dim else cut.along
    return unary(Cut(torch.cat([x, x.flip(dim)], dim), along, cut.ranks), aten.glu.default, args=(dim,))
