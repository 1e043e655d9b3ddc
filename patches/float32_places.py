"""Fixes checkpoints of the distributed optimizer for a half-precision model with some parameters in float32.

It gives the inner optimizer the parameters in float32 first, and looks them up by the place that they have in the
buffers: a float32 parameter takes another's state.
"""

from __future__ import annotations

from typing import Any

from megasched.attributes import Undo, resolve, set_attribute
from megasched.patches.registry import Patch

_RANGES = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer._build_optimizer_group_ranges"


def _change() -> Undo:
    import torch

    build_ranges = resolve(_RANGES)

    def float32_first(param_groups: Any, gbuf_ranges: Any) -> tuple[dict[Any, Any], list[dict[str, Any]]]:
        _, ranges = build_ranges(param_groups, gbuf_ranges)
        for group in ranges:
            group["params"].sort(key=lambda param: param.dtype != torch.float32)
        places = {
            param: (number, place)
            for number, group in enumerate(ranges)
            for place, param in enumerate(group["params"])
        }
        return places, ranges

    return set_attribute(_RANGES, staticmethod(float32_first))


PATCH = Patch(
    name="float32_places",
    targets=(_RANGES,),
    why=(
        "megatron/core/optimizer/distrib_optimizer.py:337 keeps the places of the parameters in the buffers, and "
        ":488 puts those in float32 before the others"
    ),
    change=_change,
    signature={_RANGES: ("param_groups", "gbuf_ranges")},
)
