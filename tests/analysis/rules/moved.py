"""Calls of operators that compute nothing: views, parts, what is joined, new tensors."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from hypothesis import reject
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from megasched.language.tensor_types import ON_ALL_RANKS, ShardDim
from tests.analysis.rules.by_parts import Example
from tests.analysis.rules.tensors import Cut, aten, beside, cuts, numbers, one_dim, places, resized, some, unary

# --- nothing is computed

_LIKE = frozenset(["zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like"])
_DRAWN_IN_PLACE = {"uniform_": (), "normal_": (), "exponential_": (), "bernoulli_": (0.5,)}
KEEPS = frozenset(
    (
        *("clone", "detach", "alias", "contiguous", "_to_copy", "lift_fresh", "lift_fresh_copy", "native_dropout"),
        *("hardswish", "dropout", "fill_", "fill", "zero_", "zero", "bernoulli", "log_sigmoid_forward"),
        *_LIKE,
        *_DRAWN_IN_PLACE,
    )
)


def with_strides(sizes: dict[int, Any]) -> dict[int, Any]:
    """Arguments that are sizes, and those after them that are the strides of a tensor of these."""
    strides = torch.empty(list(sizes.values())).stride()
    return sizes | {1 + len(sizes) + index: step for index, step in enumerate(strides)}


@st.composite
def keeps(draw: DrawFn, name: str) -> Example:
    cut = draw(cuts(few=True))
    if name in _DRAWN_IN_PLACE:
        overload = "float" if name == "bernoulli_" else "default"
        example = unary(cut, getattr(getattr(aten, name), overload), args=_DRAWN_IN_PLACE[name])
    elif name in ("fill_", "fill"):
        example = unary(cut, getattr(aten, name).Scalar, args=(0.5,))
    elif name == "full_like":
        example = unary(cut, aten.full_like.default, args=(0.5,))
    elif name == "_to_copy":
        example = unary(cut, aten._to_copy.default, {"dtype": torch.float32})
    elif name in ("dropout", "native_dropout"):
        train = draw(st.booleans())
        example = unary(cut, getattr(aten, name).default, args=(0.5, train))
        example.drawn = train
    else:
        example = unary(cut, getattr(aten, name).default)
    example.drawn |= name in {*_DRAWN_IN_PLACE, "bernoulli", "empty_like", "rand_like", "randn_like"}
    return example


NEW = frozenset(["new_zeros", "new_ones", "new_full", "new_empty", "new_empty_strided"])


@st.composite
def new_ones(draw: DrawFn, name: str) -> Example:
    """Sizes taken from a tensor, of as many dimensions; behind the one that is cut there may be others."""
    cut = draw(cuts(few=True))
    size = [*cut.shape[: cut.dim + 1], *(draw(st.integers(1, 3)) for _ in cut.shape[cut.dim + 1 :])]
    more: tuple[Any, ...] = {"new_full": (0.5,), "new_empty_strided": (torch.empty(size).stride(),)}.get(name, ())
    example = unary(cut, getattr(aten, name).default, args=(size, *more))
    example.drawn = "empty" in name
    by_size = resized(1, size)

    def sizes(found: list[ShardDim | None], ranks: int) -> dict[int, Any]:
        own = by_size(found, ranks)
        return with_strides(own) if name == "new_empty_strided" else own

    example.sizes = sizes
    return example


@st.composite
def copies(draw: DrawFn, name: str) -> Example:
    cut = draw(cuts())
    other, along = beside(draw, cut)
    swapped = draw(st.booleans()) and other.shape == cut.tensor.shape
    first, second = (other, cut.tensor) if swapped else (cut.tensor, other)
    places_ = [along, cut.along] if swapped else [cut.along, along]
    return Example(
        aten.copy_.default, (first, second), {}, {i: a for i, a in enumerate(places_) if a}, ranks=cut.ranks
    )


# --- moved

VIEWS = frozenset(["view", "_unsafe_view", "reshape", "_reshape_alias"])
MOVES = frozenset(["transpose", "t", "permute", "unsqueeze", "squeeze", "expand"])


@st.composite
def views(draw: DrawFn, name: str) -> Example:
    cut = draw(cuts(few=True))
    total, after = cut.tensor.numel(), []
    while total > 1:
        piece = some(draw, *(n for n in range(2, total + 1) if total % n == 0))
        after.append(piece)
        total //= piece
    for _ in range(draw(st.integers(0, 2))):
        after.insert(draw(st.integers(0, len(after))), 1)
    more = (torch.empty(after).stride(),) if name == "_reshape_alias" else ()
    example = unary(cut, getattr(aten, name).default, args=(after, *more))

    def sizes(found: list[ShardDim | None], ranks: int) -> dict[int, Any]:
        along = found[0]
        assert along is not None
        lengths = along.components or (after[along.dim] // along.outer,)
        heads = along.heads or (0,) * len(lengths)
        if any(length % (few or ranks) for length, few in zip(lengths, heads, strict=True)):
            reject()  # the view splits what a rank holds, as TP does that does not divide the heads
        own = resized(1, after)(found, ranks)
        return with_strides(own) if name == "_reshape_alias" else own

    example.sizes = sizes
    return example


@st.composite
def moves(draw: DrawFn, name: str) -> Example:
    cut = draw(cuts(few=True, most=2 if name == "t" else 4))
    x = cut.tensor
    if name == "t":
        return unary(cut, aten.t.default)
    if name == "transpose":
        return unary(cut, aten.transpose.int, args=(one_dim(draw, x), one_dim(draw, x)))
    if name == "permute":
        order = draw(st.permutations(range(x.dim())))
        return unary(cut, aten.permute.default, args=([d - x.dim() if draw(st.booleans()) else d for d in order],))
    if name == "unsqueeze":
        return unary(cut, aten.unsqueeze.default, args=(draw(st.integers(-x.dim() - 1, x.dim())),))
    if name == "squeeze":
        if draw(st.booleans()):
            return unary(cut, aten.squeeze.dim, args=(one_dim(draw, x),))
        dims = draw(st.lists(st.integers(0, x.dim() - 1), unique=True))
        return unary(cut, aten.squeeze.dims, args=(dims,))
    front = draw(st.lists(st.integers(1, 3), max_size=2))
    size = [*front, *(draw(st.integers(1, 3)) if s == 1 and d != cut.dim else s for d, s in enumerate(x.shape))]
    example = unary(cut, aten.expand.default, args=(size,))
    example.sizes = resized(1, size)
    return example


# --- parts

PARTS = frozenset(["slice", "select", "split", "split_with_sizes", "unbind", "index_select", "narrow"])


@st.composite
def parts(draw: DrawFn, name: str) -> Example:
    cut = draw(cuts(few=True))
    x = cut.tensor
    dim = one_dim(draw, x)
    size, of_cut = x.shape[dim], dim % x.dim() == cut.dim
    bounds = _bounds(cut) if of_cut else list(range(size + 1))
    first, last = sorted(draw(st.lists(st.sampled_from(bounds), min_size=2, max_size=2, unique=True)))
    local = _local_bounds(cut)

    def own(**values: int) -> Any:  # of bounds along the dimension that is cut
        at = {"start": 2, "end": 3}
        return lambda found, ranks: {at[key]: local.get(value, 0) for key, value in values.items()}

    if name in ("slice", "narrow"):
        if name == "slice":
            step = some(draw, 1, 1, 2)
            example = unary(cut, aten.slice.Tensor, args=(dim, first, last, step))
            example.sizes = own(start=first, end=last) if of_cut else example.sizes
            return example
        example = unary(cut, aten.narrow.default, args=(dim, first, last - first))
        if of_cut:
            example.sizes = lambda found, ranks: {2: local[first], 3: local[last] - local[first]}
        return example
    if name == "select":
        return unary(cut, aten.select.int, args=(dim, draw(st.integers(0, size - 1))))
    if name == "unbind":
        return unary(cut, aten.unbind.int, args=(dim,))
    if name == "index_select":
        return unary(cut, aten.index_select.default, args=(dim, places(draw, [2], size)))
    if name == "split":
        piece = some(draw, *(n for n in range(1, size + 1) if size % n == 0))
        example = unary(
            cut, aten.split.Tensor, args=(x.shape[dim] if of_cut and draw(st.booleans()) else piece, dim)
        )
        if of_cut:
            example.sizes = _one_piece(example.args[1])
        return example
    stops = sorted({0, size, *draw(st.lists(st.sampled_from(bounds), max_size=2))})
    pieces = [stop - start for start, stop in pairwise(stops)]
    example = unary(cut, aten.split_with_sizes.default, args=(pieces, dim))
    if of_cut:
        example.sizes = lambda found, ranks: {
            1 + index: local[stop] - local[start] for index, (start, stop) in enumerate(pairwise(stops))
        }
    return example


def _one_piece(size: int) -> Any:
    """For ``Example.sizes``: pieces of one size, of which a rank may have no such pieces."""

    def sizes(found: list[ShardDim | None], ranks: int) -> dict[int, Any]:
        own = {along.on_rank(size, ranks) if along != ON_ALL_RANKS else size for along in found if along}
        if len(own) > 1:
            reject()
        return {1: own.pop()}

    return sizes


def _bounds(cut: Cut) -> list[int]:
    """Boundaries of components, and one that is none."""
    size = cut.shape[cut.dim]
    return sorted({0, size, 1, *_local_bounds(cut)})


def _local_bounds(cut: Cut) -> dict[int, int]:
    """A boundary of components -> where it is on a rank."""
    along, found, begin = cut.along, {0: 0}, 0
    lengths = along.components or (cut.shape[along.dim] // along.outer,)
    heads = along.heads or (0,) * len(lengths)
    own = 0
    for length, few in zip(lengths, heads, strict=True):
        begin, own = begin + length, own + length // (few or cut.ranks)
        found[begin] = own
    return found


# --- joined

JOINED = frozenset(["cat", "stack"])


@st.composite
def joined(draw: DrawFn, name: str) -> Example:
    cut = draw(cuts(few=True))
    count = draw(st.integers(2, 3))
    dim = draw(st.integers(0, cut.tensor.dim() - (name == "cat")))
    tensors, known = [cut.tensor], {0: cut.along}
    for index in range(1, count):
        shape = list(cut.shape)
        if name == "cat" and dim != cut.dim:
            shape[dim] = draw(st.integers(1, 3))
        if draw(st.booleans()) or index == 1:
            known[index] = cut.along
        tensors.append(numbers(draw, shape))
    return Example(getattr(aten, name).default, (tensors, dim), {}, known, ranks=cut.ranks)
