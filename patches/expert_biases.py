"""Weight decay: none of the biases of experts, where HF keeps those of all experts in one parameter."""

from __future__ import annotations

from functools import wraps
from typing import Any

from megasched.patches.attributes import Undo, resolve, set_attribute
from megasched.patches.registry import Patch

_TARGET = "megatron.training.training:get_standard_config_overrides"
# In the form that HF gives experts (transformers/integrations/moe.py): gate_up_proj_bias, down_proj_bias.
NAMES = "*.experts.*_bias"


def _change() -> Undo:
    from megatron.core.optimizer.optimizer_config import ParamKey
    from megatron.core.optimizer_param_scheduler import ParamGroupOverride

    real = resolve(_TARGET)

    @wraps(real)
    def with_expert_biases(config: Any) -> Any:
        return {**real(config), ParamKey(name=NAMES): ParamGroupOverride(wd_mult=0.0)}

    return set_attribute(_TARGET, with_expert_biases)


PATCH = Patch(
    name="expert_biases",
    targets=(_TARGET,),
    versions={"megatron-core": ">=0.19,<0.20"},
    why=(
        "megatron/core/optimizer/__init__.py:113 decays no bias, which it knows by one dimension or by its name; "
        "HF's biases of all experts [experts, f] have neither, so that they would be decayed, and where each is "
        "Megatron's own (level block) not: optimizer states would not go from one to the other"
    ),
    change=_change,
    signature={_TARGET: ("config",)},
)
