"""Where the sequence is in what an operation gives, when its operands have a part of the sequence each.

Stricter than ``dims.follow``, which it stands on: of an operation that is not known here, nothing is taken for
granted, whatever shape it gives.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from megasched.analysis.recording.operators import arguments_of
from megasched.analysis.rules.dims import MOVES, NORMS, PRODUCTS, STAYS, VIEWS, WHOLE, NeedsWhole, follow
from megasched.analysis.rules.op_rules import op_rule
from megasched.language.tensor_types import ShardDim

Place = Callable[[torch.Tensor], ShardDim | None]

# Each value goes where it was, or a new one is made for it without looking at others.
_SAME = frozenset(
    (
        *("clone", "detach", "alias", "_to_copy", "lift_fresh", "contiguous", "fill", "zero"),
        *("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "bernoulli"),
        "native_dropout",
    )
)
_COMPUTED = (
    PRODUCTS | WHOLE | NORMS | {"cat", "stack", "slice", "select", "split", "split_with_sizes", "unbind", "narrow"}
)
_KNOWN = _SAME | MOVES | VIEWS | STAYS | _COMPUTED


def follow_sequence(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: list[torch.Tensor], along: Place
) -> list[ShardDim | None]:
    """Where the sequence is in each output; None where other tokens than its own may be in a value.

    Args:
        along: where it is in an operand; None for one that is the same on all ranks.
    """
    if not isinstance(func, torch._ops.OpOverload):
        return [None] * len(outputs)
    name = func.overloadpacket.__name__
    if name.endswith("_") and name != "copy_":
        name = name[:-1]
    told = arguments_of(func, args, kwargs)
    ruled = op_rule(func) is not None
    if name in _SPECIAL and not ruled:
        return [_SPECIAL[name](told, along, outputs[0])] * len(outputs)
    if not ruled and name not in _KNOWN and name != "copy_" and torch.Tag.pointwise not in func.tags:
        return [None] * len(outputs)
    try:
        return follow(func, args, kwargs, outputs, along)
    except NeedsWhole:
        return [None] * len(outputs)


def _embedding(told: dict[str, Any], along: Place, out: torch.Tensor) -> ShardDim | None:
    by_frequency = told["scale_grad_by_freq"]  # of an id in all of the sequence
    return along(told["indices"]) if along(told["weight"]) is None and not by_frequency else None


def _index(told: dict[str, Any], along: Place, out: torch.Tensor) -> ShardDim | None:
    """A table that is the same for all, read at one index for each token."""
    indices = told["indices"]
    given = [place for place, index in enumerate(indices) if index is not None]
    if along(told["self"]) is not None or len(given) != 1:
        return None
    found = along(indices[given[0]])
    return None if found is None else replace(found, dim=found.dim + given[0])


def _gather(told: dict[str, Any], along: Place, out: torch.Tensor) -> ShardDim | None:
    """Each token reads a table that is whole along the sequence itself, or one that is the same for all tokens."""
    table, index = along(told["self"]), along(told["index"])
    if index is None:
        return None
    along_sequence = told["dim"] % out.dim() == index.dim
    if table is None:
        return index if along_sequence or told["self"].stride(index.dim) == 0 else None
    return index if table == index and not along_sequence else None


def _scatter(told: dict[str, Any], along: Place, out: torch.Tensor) -> ShardDim | None:
    place = along(told["self"])
    source = told.get("src")
    same = along(told["index"]) == place and (not isinstance(source, torch.Tensor) or along(source) == place)
    return place if same and place is not None and told["dim"] % out.dim() != place.dim else None


def _index_select(told: dict[str, Any], along: Place, out: torch.Tensor) -> ShardDim | None:
    index = along(told["index"])
    if index is None or along(told["self"]) is not None:
        return None
    return replace(index, dim=told["dim"] % out.dim())


def _repeat(told: dict[str, Any], along: Place, out: torch.Tensor) -> ShardDim | None:
    place, new = along(told["self"]), len(told["repeats"]) - told["self"].dim()
    if place is None or told["repeats"][new + place.dim] != 1:
        return None
    return replace(place, dim=new + place.dim)


def _glu(told: dict[str, Any], along: Place, out: torch.Tensor) -> ShardDim | None:
    place = along(told["self"])
    return place if place is not None and told["dim"] % out.dim() != place.dim else None


_SPECIAL: dict[str, Callable[[dict[str, Any], Place, torch.Tensor], ShardDim | None]] = {
    "embedding": _embedding,
    "index": _index,
    "gather": _gather,
    "scatter": _scatter,
    "index_select": _index_select,
    "repeat": _repeat,
    "glu": _glu,
}
