"""Along which dimension a tensor is cut over TP, followed through the operations of one run.

A column linear's output is cut along its last dimension; views, transposes and matrix products take the cut
elsewhere. What can't be computed on a part (a norm over the cut dimension, a slice of it, a product that sums
over it) needs the whole; an operation without a rule says nothing, and is taken for one that needs it, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from math import prod
from typing import Any

import torch

from megasched.analysis.recording.meta_call import tensors_in
from megasched.analysis.recording.operators import arguments_of
from megasched.analysis.rules.op_rules import OpRule, op_rule
from megasched.language.tensor_types import ON_ALL_RANKS, ShardDim


def local_shard(tensor: torch.Tensor, along: ShardDim, rank: int, ranks: int) -> torch.Tensor:
    """What one of ``ranks`` has of a tensor that is cut so; its components are not replicated.

    Raises:
        ValueError: it is not shared out evenly.
    """
    lengths = along.components or (tensor.shape[along.dim] // along.outer,)
    inner, places = sum(lengths), []
    for outer in range(along.outer):
        begin = outer * inner
        for length in lengths:
            size, rest = divmod(length, ranks)
            if rest or any(along.heads):
                raise ValueError(f"{tuple(tensor.shape)} is not shared out evenly over {ranks}: {along}")
            places += range(begin + rank * size, begin + (rank + 1) * size)
            begin += length
    return tensor.index_select(along.dim, torch.tensor(places))


class NeedsWhole(Exception):
    """The operation can't be done part by part.

    Args:
        met: tensors that are whole where others are cut, and how they would have to be cut for it to be done.
    """

    def __init__(self, *met: tuple[torch.Tensor, ShardDim]) -> None:
        super().__init__()
        self.met = met


class NoRule(NeedsWhole):
    """Nothing is known of the operation, so that it is taken for one that needs the whole."""


# Take the whole of the dimensions they are told, or of all where they are told none.
WHOLE = frozenset(
    (
        *("sum", "mean", "prod", "amax", "amin", "max", "min", "argmax", "argmin", "all", "any", "median"),
        *("var", "std", "var_mean", "std_mean", "norm", "linalg_vector_norm", "logsumexp"),
        *("_softmax", "_safe_softmax", "_log_softmax", "cumsum", "cumprod", "sort", "topk", "kthvalue"),
        *("flip", "roll"),
    )
)
# Compute nothing, or each element by itself, and are not tagged as pointwise.
_KEEPS = frozenset(
    (
        *("clone", "detach", "alias", "contiguous", "_to_copy", "lift_fresh", "native_dropout"),
        *("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like"),
        *("fill_", "zero_", "uniform_", "normal_", "exponential_", "bernoulli", "bernoulli_"),
        "log_sigmoid_forward",
    )
)
# Take elements along a dimension, or put them there: where an index of their shape says, or a list of places.
_BY_ELEMENT = frozenset(["gather", "scatter", "scatter_", "scatter_add", "scatter_add_"])
_BY_PLACE = frozenset(["index_add", "index_add_"])
MOVES = frozenset(["transpose", "t", "permute", "unsqueeze", "squeeze", "expand"])
NORMS = frozenset(["native_layer_norm", "layer_norm", "rms_norm", "_fused_rms_norm"])
VIEWS = frozenset(["view", "_unsafe_view", "reshape", "_reshape_alias"])
PRODUCTS = frozenset(["mm", "bmm", "addmm", "baddbmm", "matmul"])
PARTS = frozenset(["slice", "select", "split", "split_with_sizes", "unbind", "index_select", "narrow"])
# Leave a dimension where it is, or need the whole of it.
STAYS = frozenset(["view_as_complex", "view_as_real", "constant_pad_nd", "convolution"])
_KNOWN = WHOLE | _KEEPS | _BY_ELEMENT | _BY_PLACE | NORMS | VIEWS | PRODUCTS | PARTS | MOVES | STAYS
_KNOWN |= {"index", "cat", "stack", "copy_"}


def follow(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    outputs: list[torch.Tensor],
    along: Callable[..., Any],
) -> list[ShardDim | None]:
    """How each output of an operation is cut; None where that could not be followed.

    Args:
        along: tensor -> ``ShardDim``, or None for one that is not cut, or of which it is not known how.

    Raises:
        NeedsWhole: the operation needs all of a dimension that is cut; ``NoRule`` where it is not known.
    """
    operands = tensors_in((args, kwargs))
    cut = [(tensor, found) for tensor in operands if (found := along(tensor)) is not None]
    if not cut:
        return [None] * len(outputs)
    if not isinstance(func, torch._ops.OpOverload):
        raise NoRule
    if (rule := op_rule(func)) is not None:
        return _by_rule(rule, arguments_of(func, args, kwargs), along, outputs)
    x, a = cut[0]
    name = func.overloadpacket.__name__
    if name not in _KNOWN and torch.Tag.pointwise not in func.tags and not name.startswith("new_"):
        raise NoRule
    if torch.Tag.pointwise in func.tags or name == "copy_":
        return [_pointwise(operands, cut, out) for out in outputs]
    told = arguments_of(func, args, kwargs)
    if name in PRODUCTS:
        placed = _product(*operands[-2:], along, outputs[0])
        if placed is not None and len(operands) > 2:
            _added(operands[0], along(operands[0]), placed, outputs[0])
        return [placed] * len(outputs)
    if name == "cat":
        return [_cat(operands, cut, told["dim"] % x.dim())]
    if name == "stack":
        place = _cat(operands, cut, -1)
        return [replace(place, dim=place.dim + (told["dim"] % outputs[0].dim() <= place.dim))]
    if name in WHOLE:
        dims = _dims(told, x)
        if a.dim in dims:
            raise NeedsWhole
        gone = sum(d < a.dim for d in dims) if outputs[0].dim() < x.dim() else 0
        return [replace(a, dim=a.dim - gone)] * len(outputs)
    if name in NORMS:
        if a.dim >= x.dim() - len(told["normalized_shape"]):
            raise NeedsWhole
        return [a if out.dim() == x.dim() else None for out in outputs]
    if name in _BY_ELEMENT | _BY_PLACE:
        return [_along_one(told, along, places=name in _BY_PLACE)] * len(outputs)
    if x is not told.get("self", told.get("input", x)) or len(cut) > 1:
        raise NeedsWhole  # a table that is whole is read by indices of a part
    if name in STAYS:
        if not _stays(name, told, x, a.dim):
            raise NeedsWhole
        return [a]
    if name in PARTS:
        return _part(name, told, x, a, outputs)
    moved = _moved(name, told, x, a, outputs[0]) if outputs else None
    return [moved] * len(outputs)


def _by_rule(
    rule: OpRule, told: dict[str, Any], along: Callable[..., Any], outputs: list[torch.Tensor]
) -> list[ShardDim | None]:
    tensors = {name: value for name, value in told.items() if isinstance(value, torch.Tensor)}
    cut = {name: place for name, tensor in tensors.items() if (place := along(tensor)) is not None}
    kinds = {replace(place, dim=0) for place in cut.values()}
    if len(kinds) > 1:
        raise NeedsWhole
    dim = rule({name: place.dim for name, place in cut.items()}, told)
    if dim is None:
        raise NeedsWhole
    (kind,) = kinds
    return [replace(kind, dim=dim % out.dim()) for out in outputs]


def _dims(told: dict[str, Any], x: torch.Tensor) -> list[int]:
    dims = told.get("dim", told.get("dims"))
    if dims is None or dims == []:
        return list(range(x.dim()))
    return [d % x.dim() for d in (dims if isinstance(dims, list | tuple) else [dims])]


def _pointwise(
    operands: Sequence[torch.Tensor], cut: Sequence[tuple[torch.Tensor, ShardDim]], out: torch.Tensor
) -> ShardDim | None:
    """Dimensions are aligned at the right; what is whole must be the same for all along the cut one."""
    places = {replace(a, dim=a.dim - tensor.dim() + out.dim()) for tensor, a in cut}
    if len(places) > 1:
        raise NeedsWhole
    (place,) = places
    _same_for_all(operands, [tensor for tensor, _ in cut], place, out)
    return place


def _same_for_all(
    operands: Sequence[torch.Tensor], known: Sequence[torch.Tensor], place: ShardDim, out: torch.Tensor
) -> None:
    """What is whole must be the same along the dimension that is cut: of size 1 there, or expanded to its size.

    An expanded tensor was made of one as large as another; on a rank it is as large as that one is there.
    """
    met = []
    for tensor in operands:
        own = place.dim - out.dim() + tensor.dim()
        differs = own >= 0 and tensor.shape[own] > 1 and tensor.stride(own) != 0
        if differs and all(tensor is not other for other in known):
            met.append((tensor, replace(place, dim=own)))
    if met:
        raise NeedsWhole(*met)


def _product(a: torch.Tensor, b: torch.Tensor, along: Callable[..., Any], out: torch.Tensor) -> ShardDim | None:
    left, right = along(a), along(b)
    if (left is not None and left.dim == a.dim() - 1) or (right is not None and right.dim == b.dim() - 2):
        raise NeedsWhole  # each rank would have a part of the sum
    places = {found for found in (left, right) if found is not None}
    if len(places) != 1 or not a.dim() == b.dim() == out.dim():
        return None
    (place,) = places
    if place.dim < out.dim() - 2:  # of the batch, which both have
        _same_for_all((a, b), [tensor for tensor in (a, b) if along(tensor) is not None], place, out)
    return place


def _added(tensor: torch.Tensor, a: ShardDim | None, place: ShardDim, out: torch.Tensor) -> None:
    """What is added to a product must be cut as the product is, or be the same for all."""
    if a is None:
        _same_for_all([tensor], [], place, out)
    elif replace(a, dim=a.dim - tensor.dim() + out.dim()) != place:
        raise NeedsWhole


def _cat(operands: Sequence[torch.Tensor], cut: Sequence[tuple[torch.Tensor, ShardDim]], dim: int) -> ShardDim:
    places = {a for _, a in cut}
    if len(places) > 1 or next(iter(places)).dim == dim:
        raise NeedsWhole
    place = places.pop()
    filled = [tensor for tensor in operands if tensor.numel() > 0]  # a cache begins as an empty tensor
    _same_for_all(filled, [tensor for tensor, _ in cut], place, filled[0])
    return place


def _part(
    name: str, told: dict[str, Any], x: torch.Tensor, a: ShardDim, outputs: list[torch.Tensor]
) -> list[ShardDim | None]:
    dim = told["dim"] % x.dim()
    if dim != a.dim:
        gone = name in ("select", "unbind") and dim < a.dim
        return [replace(a, dim=a.dim - gone)] * len(outputs)
    size = x.shape[dim]
    if name == "slice":
        start, end, _ = slice(told["start"], told["end"]).indices(size)
        pieces = [(start, end)] if told["step"] == 1 else []
    elif name in ("split", "split_with_sizes"):
        stops = list(accumulate(out.shape[dim] for out in outputs))
        pieces = list(zip([0, *stops], stops, strict=False))
    else:
        pieces = []
    if len(pieces) != len(outputs) or a.outer > 1:
        raise NeedsWhole
    return [_between(a, size, start, end) for start, end in pieces]


def _between(a: ShardDim, size: int, start: int, end: int) -> ShardDim:
    """How what lies between two positions is cut; they must be boundaries of components."""
    sizes = a.components or (size,)
    bounds = [0, *accumulate(sizes)]
    if start not in bounds or end not in bounds:
        raise NeedsWhole
    chosen = slice(bounds.index(start), bounds.index(end))
    components, heads = sizes[chosen], a.heads[chosen]
    if set(heads) == {1}:
        return ON_ALL_RANKS
    return ShardDim(a.dim, 1, components if len(components) > 1 else (), heads if any(heads) else ())


def _moved(name: str, told: dict[str, Any], x: torch.Tensor, a: ShardDim, out: torch.Tensor) -> ShardDim | None:
    """Where an operation that computes nothing takes the cut dimension."""
    dim = a.dim
    if name in VIEWS:
        return _viewed(x.shape, a, out.shape)
    if name == "transpose":
        swapped = [told["dim0"] % x.dim(), told["dim1"] % x.dim()]
        dim = swapped[1 - swapped.index(a.dim)] if a.dim in swapped else a.dim
    elif name == "t":
        dim = 1 - a.dim if x.dim() == 2 else a.dim
    elif name == "permute":
        dim = [d % x.dim() for d in told["dims"]].index(a.dim)
    elif name == "unsqueeze":
        dim = a.dim + (told["dim"] % out.dim() <= a.dim)
    elif name == "squeeze":
        asked = _dims(told, x)
        if a.dim in asked:
            raise NeedsWhole  # of size 1 on a rank, it would be gone there
        dim = a.dim - sum(d < a.dim and x.shape[d] == 1 for d in asked)
    elif name == "expand":
        dim = a.dim + out.dim() - x.dim()
    elif name.startswith("new_") and out.dim() == x.dim() and out.shape[: a.dim + 1] == x.shape[: a.dim + 1]:
        dim = a.dim  # sizes that were taken from a tensor that is cut
    elif name == "index":
        return _indexed(told["indices"], a)
    elif out.shape != x.shape or name not in _KEEPS:
        return None
    return replace(a, dim=dim)


def _stays(name: str, told: dict[str, Any], x: torch.Tensor, dim: int) -> bool:
    """Whether the places of a dimension are taken one by one."""
    if name == "view_as_complex":
        return dim < x.dim() - 1  # the last one has the two parts of a number
    if name == "constant_pad_nd":
        pad, after = told["pad"], 2 * (x.dim() - 1 - dim)
        return not any(pad[after : after + 2])
    if name == "convolution" and dim > 0:
        alone = {"stride": 1, "padding": 0, "output_padding": 0}
        by_itself = all(set(told[name]) == {value} for name, value in alone.items())
        return dim > 1 and told["weight"].shape[dim] == 1 and by_itself
    return True


def _along_one(told: dict[str, Any], along: Callable[..., Any], *, places: bool) -> ShardDim:
    """Elements are taken or put along a dimension while another one is cut: alike in all that has the elements.

    Args:
        places: the index is a list of places, and not one for each element.
    """
    x = told["self"]
    given = [x, told.get("src"), told.get("source"), None if places else told["index"]]
    elements = [tensor for tensor in given if isinstance(tensor, torch.Tensor)]
    found = {place for tensor in elements if (place := along(tensor)) is not None}
    if len(found) != 1 or (places and along(told["index"]) is not None):
        raise NeedsWhole
    (place,) = found
    if place.dim == told["dim"] % x.dim() or len({tensor.shape[place.dim] for tensor in elements}) > 1:
        raise NeedsWhole
    _same_for_all(elements, [tensor for tensor in elements if along(tensor) is not None], place, x)
    return place


def _indexed(indices: Sequence[torch.Tensor | None], a: ShardDim) -> ShardDim | None:
    """Elements that are taken along other dimensions leave the cut between the dimensions that stay.

    Where indices stand side by side, what they are broadcast to comes in their place, else in front of all.
    """
    given: dict[int, torch.Tensor] = {}
    dim = 0
    for index in indices:
        consumed = index.dim() if index is not None and index.dtype == torch.bool else 1
        if index is not None:
            given |= dict.fromkeys(range(dim, dim + consumed), index)
        dim += consumed
    if a.dim in given:
        return None
    made = max(1 if index.dtype == torch.bool else index.dim() for index in given.values())
    side_by_side = max(given) - min(given) + 1 == len(given)
    before = made if not side_by_side or min(given) < a.dim else 0
    return replace(a, dim=a.dim - sum(dim < a.dim for dim in given) + before)


def _viewed(before: Sequence[int], a: ShardDim, after: Sequence[int]) -> ShardDim | None:
    """The dimension of a view that holds the cut, or its outermost part."""
    outside = prod(before[: a.dim]) * a.outer
    for index, size in enumerate(after):
        passed = prod(after[:index])
        if passed <= outside < passed * size:
            outer, rest = divmod(outside, passed)
            if rest or size % outer:
                return None
            components = _in_units(a.components, before[a.dim] // a.outer, size // outer)
            return None if components is None else ShardDim(index, outer, components, a.heads)
    return None


def _in_units(components: tuple[int, ...], before: int, after: int) -> tuple[int, ...] | None:
    """Sizes of components in a view that counts ``after`` (heads) where there were ``before`` (features).

    None where a component is no whole number of them.
    """
    if any(size * after % before for size in components):
        return None
    return tuple(size * after // before for size in components)
