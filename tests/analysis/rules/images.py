"""Calls of operators on images: pools, padding, interpolation, batch norms."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from megasched.language.tensor_types import ShardDim
from tests.analysis.rules.by_parts import Example
from tests.analysis.rules.tensors import aten, cuts, numbers, some, unary

_POOLS = ("avg_pool{}d", "max_pool{}d_with_indices", "_adaptive_avg_pool{}d", "adaptive_max_pool{}d")
_PADDING = ("reflection_pad{}d", "replication_pad{}d")
_NEAREST = ("upsample_nearest{}d", "_upsample_nearest_exact{}d")
_LINEAR = ("upsample_bicubic2d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa")
_LINEAR += ("upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d")
# Name -> dimensions of a place.
_SPATIAL = {
    **{name.format(n): n for n in (2, 3) for name in _POOLS},
    **{name.format(n): n for n in (1, 2, 3) for name in (*_PADDING, *_NEAREST)},
    **{name: int(name.removesuffix("_aa")[-2]) for name in _LINEAR},
}
IMAGES = frozenset(_SPATIAL)
BATCH_NORMS = frozenset(["native_batch_norm"])


@st.composite
def images(draw: DrawFn, name: str) -> Example:
    """[samples, channels, places...], cut along any dimension; those along which it is cut have four places."""
    spatial = _SPATIAL[name]
    cut = draw(cuts(least=2 + spatial, most=2 + spatial))
    x = cut.tensor
    sizes = [draw(st.integers(1, 4)) for _ in range(spatial)]
    args: tuple[Any, ...]
    if "adaptive" in name:
        args = (sizes,)
    elif "pool" in name:
        window = [min(size, of) for size, of in zip(sizes, x.shape[2:], strict=True)]
        args = (window, [draw(st.integers(1, 2)) for _ in window], [some(draw, 0, size // 2) for size in window])
    elif "pad" in name:
        most = [of - 1 if "reflection" in name else 2 for of in reversed(x.shape[2:])]
        args = ([draw(st.integers(0, size)) for size in most for _ in range(2)],)
    else:
        args = (sizes,) if "nearest" in name else (sizes, draw(st.booleans()))
    return unary(cut, getattr(aten, name).default, args=args)


@st.composite
def batch_norms(draw: DrawFn, name: str) -> Example:
    """With weights and running statistics that are cut as the channels are, or without some of them."""
    cut = draw(cuts(least=3, dim=some(draw, 1, 1, 1, 0)))
    along = ShardDim(0, components=cut.along.components)
    own = [numbers(draw, [cut.shape[1]]) if draw(st.booleans()) else None for _ in range(2)]
    training = draw(st.booleans())
    running = [numbers(draw, [cut.shape[1]]) if draw(st.booleans()) or not training else None] * 2
    running = [None if one is None else one.clone() for one in running]
    args = (cut.tensor, *own, *running, training, 0.1, 1e-3)
    at = [index for index, leaf in enumerate(args) if index and isinstance(leaf, torch.Tensor)]
    left_whole = draw(st.booleans()) and draw(st.booleans())
    known = {} if left_whole else dict.fromkeys(at, along)
    leaves = {0: cut.along, **known}
    return Example(aten.native_batch_norm.default, args, {}, leaves, ranks=cut.ranks, constants=frozenset((3, 4)))
