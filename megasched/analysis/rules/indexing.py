"""Defines rules for operators that take elements at indices, or put them there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from megasched.analysis.rules.op_call import NeedsWhole, OpCall
from megasched.analysis.rules.table import rule
from megasched.language.tensor_types import ShardDim


@rule("gather")
def gather(call: OpCall) -> ShardDim:
    """Follows the cut where each taken element has its own index; a whole table can be read at any place."""
    table, index = call.arguments["self"], call.arguments["index"]
    along = call.along(index)
    if along is not None and call.along(table) is None and call.dim(table) == along.dim:
        return along
    return _by_element(call, [table, index])


@rule("scatter", "scatter_add")
def scatter(call: OpCall) -> ShardDim:
    """Follows the cut where each element that is put somewhere has its own index."""
    return _by_element(call, [call.arguments[name] for name in ("self", "index", "src") if name in call.arguments])


@rule("index_add")
def index_add(call: OpCall) -> ShardDim:
    """Follows the cut where one list of places serves all elements."""
    told = call.arguments
    if call.along(told["index"]) is not None:
        raise NeedsWhole
    return _by_element(call, [told["self"], told["source"]])


def _by_element(call: OpCall, given: Sequence[Any]) -> ShardDim:
    """Keeps a cut that all tensors have alike, and that is not along the dimension of the indices."""
    x, *others = (tensor for tensor in given if isinstance(tensor, torch.Tensor))
    found = {along for tensor in (x, *others) if (along := call.along(tensor)) is not None}
    if len(found) != 1:
        raise NeedsWhole
    (along,) = found
    if along.dim == call.dim(x) or any(tensor.shape[along.dim] != x.shape[along.dim] for tensor in others):
        raise NeedsWhole
    call.require_same((x, *others), along, x)
    return along


@rule("embedding")
def embedding(call: OpCall) -> ShardDim:
    """Takes the cut of the indices, each of which reads a row of a whole table."""
    told = call.arguments
    along = call.along(told["indices"])
    by_frequency = told["scale_grad_by_freq"]  # of an index in all of the sequence
    if along is None or call.along(told["weight"]) is not None or by_frequency:
        raise NeedsWhole
    return along


@rule("index_select")
def index_select(call: OpCall) -> ShardDim:
    """Follows the cut of a list of places into a whole table, or a cut of another dimension of the table."""
    x, index = call.arguments["self"], call.arguments["index"]
    dim, own, listed = call.dim(x), call.along(x), call.along(index)
    if own is None and listed is not None:
        return replace(listed, dim=dim)
    if own is None or listed is not None or own.dim == dim:
        raise NeedsWhole
    return own


@rule("index")
def index(call: OpCall) -> ShardDim:
    """Follows ``x[i, :, j]`` with whole indices into a cut tensor, or with one cut index into a whole tensor."""
    x, indices = call.arguments["self"], call.arguments["indices"]
    own = call.along(x)
    given = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    if own is not None and len(call.cut) == 1:
        return _beside(indices, own)
    if own is None and len(given) == 1:
        ((dim, places),) = given
        along = call.along(places)
        if along is not None and places.dtype != torch.bool:
            return replace(along, dim=along.dim + dim)
    raise NeedsWhole


def _beside(indices: Sequence[torch.Tensor | None], along: ShardDim) -> ShardDim:
    """Returns the new place of a cut beside dimensions from which elements are taken.

    Where the indices are adjacent, their broadcast dimensions come in their place, else in front of all.
    """
    given: dict[int, torch.Tensor] = {}
    dim = 0
    for index in indices:
        consumed = index.dim() if index is not None and index.dtype == torch.bool else 1
        if index is not None:
            given |= dict.fromkeys(range(dim, dim + consumed), index)
        dim += consumed
    if along.dim in given:
        raise NeedsWhole
    made = max(1 if index.dtype == torch.bool else index.dim() for index in given.values())
    side_by_side = max(given) - min(given) + 1 == len(given)
    before = made if not side_by_side or min(given) < along.dim else 0
    return replace(along, dim=along.dim - sum(dim < along.dim for dim in given) + before)
