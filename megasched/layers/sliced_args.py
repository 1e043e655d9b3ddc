"""Arguments of which each TP rank takes its part; which ones, ``analysis/parts.py`` finds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from megasched.analysis.parts import ArgSlice
from megasched.layers.wrap import Forward, wrap_forward
from megasched.plan.plan import Plan


def parts_of(plan: Plan, path: str) -> dict[int | str, ArgSlice]:
    """Arguments of one module of which each rank takes its part."""
    return {argument.slot: part for argument, part in plan.derived.parts.items() if argument.path == path}


def slice_args(module: nn.Module, parts: Mapping[int | str, ArgSlice], group: Any) -> None:
    """Hands the module this rank's part of these arguments: [..., heads, ...] -> [..., heads / tp, ...].

    They carry no gradient, so nothing is communicated.
    """

    def wrapper(forward: Forward) -> Forward:
        def taken(*args: Any, **kwargs: Any) -> Any:
            found = dict([*enumerate(args), *kwargs.items()])
            found.update({slot: _taken(found[slot], part, group) for slot, part in parts.items()})
            return forward(*(found[index] for index in range(len(args))), **{name: found[name] for name in kwargs})

        return taken

    wrap_forward(module, wrapper)


def _taken(x: torch.Tensor, part: ArgSlice, group: Any) -> torch.Tensor:
    """A view where the dimension counts nothing else: masks of every head are large."""
    length = part.count // group.size()
    start = length * group.rank()
    if x.shape[part.dim] == part.count:
        return x.narrow(part.dim, start, length)
    apart = x.unflatten(part.dim, (-1, part.count))  # [b*heads, ...] -> [b, heads, ...]
    return apart.narrow(part.dim + 1, start, length).flatten(part.dim, part.dim + 1)
