"""Fixes resuming the distributed optimizer of a float32 model, whose masters are views of its parameters."""

from __future__ import annotations

from megasched.attributes import Undo, resolve, set_attribute
from megasched.patches.registry import Patch

_CLASS = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer"
# Of the default format, and of --ckpt-format torch.
_TARGETS = tuple(f"{_CLASS}.load_parameter_state_from_{kind}" for kind in ("dp_reshardable", "dp_zero"))


def _change() -> list[Undo]:
    import torch

    return [set_attribute(target, torch.no_grad()(resolve(target))) for target in _TARGETS]


PATCH = Patch(
    name="fp32_resume",
    targets=_TARGETS,
    why=(
        "megatron/core/optimizer/distrib_optimizer.py:2061 and :2254 copy the checkpoint into the main parameters "
        "without torch.no_grad (their sibling :2095 has it); in float32 these are views of the model's "
        "parameters, and torch refuses "
        "(`a view of a leaf Variable that requires grad is being used in "
        "an in-place operation`)"
    ),
    change=_change,
    signature=dict.fromkeys(_TARGETS, ("state_dict",)),
)
