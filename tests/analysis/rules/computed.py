"""Calls of operators that compute: over dimensions, products, each element by itself."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from megasched.language.tensor_types import ShardDim
from tests.analysis.rules.by_parts import Example
from tests.analysis.rules.tensors import Cut, aten, beside, cuts, numbers, one_dim, some, unary

# --- over some dimensions

_OF_DIMS: dict[str, tuple[str, dict[str, Any]]] = {
    **dict.fromkeys(["amax", "amin", "logsumexp"], ("default", {})),
    **dict.fromkeys(["var", "std", "var_mean", "std_mean"], ("correction", {})),
    **dict.fromkeys(["all", "any"], ("dims", {})),
    "sum": ("dim_IntList", {}),
    "mean": ("dim", {}),
    "norm": ("ScalarOpt_dim", {"p": 2}),
    "linalg_vector_norm": ("default", {"ord": 3}),
}
_OF_DIM: dict[str, tuple[str, dict[str, Any]]] = {
    **dict.fromkeys(["max", "min", "median"], ("dim", {})),
    **dict.fromkeys(["argmax", "argmin"], ("default", {})),
    "prod": ("dim_int", {}),
    "kthvalue": ("default", {"k": 1}),
}
_ALONG_DIM: dict[str, dict[str, Any]] = {
    **{name: {"half_to_float": False} for name in ("_softmax", "_log_softmax")},
    **{name: {} for name in ("_safe_softmax", "cumsum", "cumprod", "sort")},
    "topk": {"k": 1},
}


@st.composite
def reductions(draw: DrawFn, name: str) -> Example:
    cut = draw(cuts())
    x = cut.tensor
    dims = draw(st.lists(st.integers(0, x.dim() - 1), unique=True, min_size=1))
    keepdim = draw(st.booleans())
    if name in _OF_DIMS:
        overload, more = _OF_DIMS[name]
        return unary(cut, getattr(getattr(aten, name), overload), {**more, "dim": dims, "keepdim": keepdim})
    if name in _OF_DIM:
        overload, more = _OF_DIM[name]
        return unary(
            cut, getattr(getattr(aten, name), overload), {**more, "dim": one_dim(draw, x), "keepdim": keepdim}
        )
    if name in _ALONG_DIM:
        return unary(cut, getattr(aten, name).default, {"dim": one_dim(draw, x), **_ALONG_DIM[name]})
    if name == "flip":
        return unary(cut, aten.flip.default, {"dims": dims})
    return unary(cut, aten.roll.default, {"shifts": [1] * len(dims), "dims": dims})


REDUCTIONS = frozenset({*_OF_DIMS, *_OF_DIM, *_ALONG_DIM, "flip", "roll"})


@st.composite
def norms(draw: DrawFn, name: str) -> Example:
    cut = draw(cuts())
    last = draw(st.integers(1, len(cut.shape)))
    shape = cut.shape[-last:]
    weight, bias = (numbers(draw, shape) for _ in range(2))
    if name in ("native_layer_norm", "layer_norm"):
        return unary(cut, getattr(aten, name).default, args=(shape, weight, bias, 1e-3))
    return unary(cut, getattr(aten, name).default, args=(shape, weight, 1e-3))


TRIANGLES = frozenset(["tril", "triu"])


@st.composite
def triangles(draw: DrawFn, name: str) -> Example:
    return unary(draw(cuts(least=2)), getattr(aten, name).default, args=(draw(st.integers(-2, 2)),))


NORMS = frozenset(["native_layer_norm", "layer_norm", "rms_norm", "_fused_rms_norm"])

# --- products

PRODUCTS = frozenset(["mm", "bmm", "addmm", "baddbmm", "matmul"])


@st.composite
def products(draw: DrawFn, name: str) -> Example:
    batched = name in ("bmm", "baddbmm") or (name == "matmul" and draw(st.booleans()))
    first = draw(st.booleans())  # which of the two is cut, if not both
    left = draw(cuts(least=2 + batched, most=2 + batched))
    size = draw(st.integers(1, 3))
    shape = left.shape
    if first:
        other = numbers(draw, [*shape[:-2], shape[-1], size])
    else:
        other = numbers(draw, [*shape[:-2], size, shape[-2]])
    both = batched and left.dim == 0 and draw(st.booleans())
    pair = (left.tensor, other) if first else (other, left.tensor)
    known = dict.fromkeys((0, 1), left.along) if both else {int(not first): left.along}
    follows = {}
    if batched and left.dim == 0 and not both and draw(st.booleans()):
        expanded = other[:1].expand(other.shape)
        pair = (left.tensor, expanded) if first else (expanded, left.tensor)
        follows = {int(first): left.along}
    if name in ("mm", "bmm", "matmul"):
        return Example(getattr(aten, name).default, pair, {}, known, follows, ranks=left.ranks)
    out = torch.matmul(*pair)
    place = left.along
    added, along = beside(draw, Cut(out, place, left.ranks)) if place.dim < out.dim() else (out, None)
    if added.dim() < out.dim() and name == "baddbmm":
        added = added.expand(out.shape) if along is None else numbers(draw, out.shape)
        along = None if along is None else place
    leaves = {0: along} | {index + 1: a for index, a in known.items()}
    follows = {index + 1: a for index, a in follows.items()}
    if along is None and 0 in added.stride() and added.shape == out.shape:
        follows[0] = place
    kwargs = {"beta": 0.5, "alpha": 2.0}
    cut = {index: a for index, a in leaves.items() if a is not None}
    return Example(getattr(aten, name).default, (added, *pair), kwargs, cut, follows, ranks=left.ranks)


# --- those that leave a dimension where it is, or need the whole of it

STAYS = frozenset(["view_as_complex", "view_as_real", "constant_pad_nd", "convolution"])


@st.composite
def stays(draw: DrawFn, name: str) -> Example:
    if name == "convolution":
        return draw(convolutions())
    cut = draw(cuts(least=2))
    x = cut.tensor
    if name == "constant_pad_nd":
        pad = draw(st.lists(st.tuples(st.integers(-1, 2), st.integers(0, 2)), max_size=x.dim()))
        room = [max(pair[0], 1 - size) for pair, size in zip(pad, reversed(x.shape), strict=False)]
        flat = [side for left, pair in zip(room, pad, strict=True) for side in (left, pair[1])]
        return unary(cut, aten.constant_pad_nd.default, args=(flat, 0.5))
    if name == "view_as_real":
        return unary(Cut(x.to(torch.complex128), cut.along, cut.ranks), aten.view_as_real.default)
    pairs = torch.stack([x, x.cos()], -1)
    return unary(Cut(pairs, cut.along, cut.ranks), aten.view_as_complex.default)


@st.composite
def convolutions(draw: DrawFn) -> Example:
    """Over one or two dimensions, transposed or not; mostly of single places."""
    spatial = draw(st.integers(1, 2))
    cut = draw(cuts(least=2 + spatial, most=2 + spatial))
    transposed, bias = draw(st.booleans()), draw(st.booleans())
    channels, out = cut.shape[1], draw(st.integers(1, 2))
    groups = some(draw, 1, channels)
    inner = [channels, out] if transposed else [out * groups, channels // groups]
    kernel, stride, padding = ([], [], [])
    for size in cut.shape[2:]:
        kernel.append(some(draw, 1, 1, min(2, size)))
        stride.append(some(draw, 1, 1, 2))
        padding.append(some(draw, 0, 0, kernel[-1] - 1))
    weight = numbers(draw, [*inner, *kernel])
    biases = numbers(draw, [out * groups]) if bias else None
    args = (weight, biases, stride, padding, [1] * spatial, transposed, [0] * spatial, groups)
    return unary(cut, aten.convolution.default, args=args)


# --- each element by itself


@cache
def pointwise_overloads() -> dict[str, tuple[Any, torch.dtype]]:
    """Every operator that torch says is pointwise and that can be called with tensors and numbers: name -> it, and
    a dtype that it takes."""
    found = {}
    for full in torch._C._dispatch_get_all_op_names():
        space, _, rest = full.partition("::")
        name, _, overload = rest.partition(".")
        if space != "aten" or name.startswith("_foreach"):
            continue
        op = getattr(getattr(aten, name), overload or "default")
        if torch.Tag.pointwise not in op.tags or any(a.is_out for a in op._schema.arguments):
            continue
        for dtype in (torch.float64, torch.int64, torch.bool, torch.complex128):
            args = _pointwise_arguments(op, lambda dtype=dtype: torch.full((2, 2), 0.5).to(dtype))
            try:
                outputs = op(*args) if args is not None else None
            except (RuntimeError, NotImplementedError, TypeError, IndexError):
                continue
            if isinstance(outputs, torch.Tensor | tuple):
                found[f"{name}.{overload or 'default'}"] = (op, dtype)
                break
    return found


_GIVEN = {"Scalar": 0.5, "number": 0.5, "float": 0.5, "int": 1, "bool": False, "Tensor": None}


def _pointwise_arguments(op: Any, tensor: Callable[[], torch.Tensor]) -> list[Any] | None:
    """Positional arguments, a new tensor for each; None where there is one of another kind."""
    args = []
    for argument in op._schema.arguments:
        kind = str(argument.type)
        if argument.kwarg_only:
            if not argument.has_default_value():
                return None
        elif kind in ("Tensor", "Optional[Tensor]"):
            args.append(tensor())
        elif argument.has_default_value():
            args.append(argument.default_value)
        elif kind in _GIVEN:
            args.append(_GIVEN[kind])
        else:
            return None
    return args


@st.composite
def pointwise(draw: DrawFn, name: str) -> Example:
    op, dtype = pointwise_overloads()[name]
    cut = draw(cuts(most=3))
    known: dict[int, ShardDim] = {}
    made: list[torch.Tensor] = []

    def tensor() -> torch.Tensor:
        value, along = (cut.tensor, cut.along) if not made else beside(draw, cut)
        made.append(value)
        if along is not None:
            known[len(made) - 1] = along
        return value.to(dtype) if dtype.is_floating_point else (8 * value).to(dtype)

    args = _pointwise_arguments(op, tensor)
    assert args is not None
    # Tensors are the only leaves that are None-free; their positions are those in the list.
    at = [index for index, value in enumerate(args) if isinstance(value, torch.Tensor)]
    example = Example(op, tuple(args), {}, {at[n]: along for n, along in known.items()}, ranks=cut.ranks)
    example.drawn = torch.Tag.nondeterministic_seeded in op.tags
    return example
