"""Exempts biases and norms from weight decay, whatever their dimensions and names are in Hugging Face."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megasched.attributes import Undo, wrap_attribute
from megasched.patches.registry import Patch
from megasched.trainer.weight_decay import SPARED

_TARGET = "megatron.training.training:get_standard_config_overrides"


def _change() -> Undo:
    from megatron.core.optimizer.optimizer_config import ParamKey
    from megatron.core.optimizer_param_scheduler import ParamGroupOverride

    def with_spared(real: Callable[..., Any], config: Any) -> Any:
        return {**real(config), ParamKey(attr=SPARED): ParamGroupOverride(wd_mult=0.0)}

    return wrap_attribute(_TARGET, with_spared)


PATCH = Patch(
    name="weight_decay",
    targets=(_TARGET,),
    why=(
        "megatron/core/optimizer/__init__.py:113 decays no bias and no norm, which it knows by one dimension or "
        "by the name: HF's biases of all experts [experts, f] and norms of heads [heads, d] have neither, so that "
        "they would be decayed, and where each is Megatron's own (level block) not: optimizer states would not go "
        "from one to the other"
    ),
    change=_change,
    signature={_TARGET: ("config",)},
)
