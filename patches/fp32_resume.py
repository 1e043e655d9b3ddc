"""Resuming the distributed optimizer in its default checkpoint format when the model trains in float32."""

from __future__ import annotations

import functools
from typing import Any

from megasched.patches.attributes import Undo, set_attribute
from megasched.patches.registry import Patch

_TARGET = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.load_parameter_state_from_dp_reshardable"


def _change() -> Undo:
    import torch
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    load = DistributedOptimizer.load_parameter_state_from_dp_reshardable

    @functools.wraps(load)
    def load_without_grad(self: Any, state_dict: dict[Any, Any]) -> None:
        with torch.no_grad():
            load(self, state_dict)

    return set_attribute(_TARGET, load_without_grad)


PATCH = Patch(
    name="fp32_resume",
    targets=(_TARGET,),
    versions={"megatron-core": ">=0.19,<0.20"},
    why=(
        "megatron/core/optimizer/distrib_optimizer.py:2061 copies the checkpoint into the main parameters "
        "without torch.no_grad (its sibling :2095 has it); in float32 these are views of the model's "
        "parameters, and torch refuses "
        "(`a view of a leaf Variable that requires grad is being used in "
        "an in-place operation`)"
    ),
    change=_change,
    signature={_TARGET: ("state_dict",)},
)
