"""Fixes checkpoints of the optimizer's state for a half-precision model with some parameters in float32.

For a float32 parameter, megatron-core 0.19 takes another parameter's state, or finds none (KeyError):

* the optimizer that is not distributed numbers only the half-precision parameters when it writes or reads
  them, while the inner optimizer numbers all;
* the distributed one gives the inner optimizer the parameters in float32 first, and looks them up by the place
  that they have in the buffers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from megasched.attributes import Undo, set_attribute
from megasched.patches.registry import Patch

_CLASS = "megatron.core.optimizer.optimizer:Float16OptimizerWithFloat16Params"
_SHARDED = f"{_CLASS}.sharded_state_dict"
_LOAD = f"{_CLASS}.load_state_dict"
_RANGES = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer._build_optimizer_group_ranges"


def _change() -> list[Undo]:
    import torch
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params as Float16Optimizer

    sharded_state_dict, load_state_dict = Float16Optimizer.sharded_state_dict, Float16Optimizer.load_state_dict

    def patched_sharded_state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _float32_is_its_own_main(self):
            return sharded_state_dict(self, *args, **kwargs)

    def patched_load_state_dict(self: Any, state_dict: dict[str, Any]) -> None:
        # --ckpt-format torch has the copies of half precision alone, in the order of these.
        saved = sum(len(group) for group in state_dict.get("fp32_from_fp16_params", ()))
        copies = sum(len(group) for group in getattr(self, "fp32_from_float16_groups", ()))
        with nullcontext() if saved == copies else _float32_is_its_own_main(self):
            load_state_dict(self, state_dict)

    build_ranges = DistributedOptimizer._build_optimizer_group_ranges

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

    return [
        set_attribute(_RANGES, staticmethod(float32_first)),
        set_attribute(_SHARDED, patched_sharded_state_dict),
        set_attribute(_LOAD, patched_load_state_dict),
    ]


@contextmanager
def _float32_is_its_own_main(optimizer: Any) -> Iterator[None]:
    """Runs its body with all parameters listed in the inner optimizer's order, each with a main parameter."""
    if optimizer.is_stub_optimizer or not any(optimizer.fp32_from_fp32_groups):
        yield
        return
    before = optimizer.float16_groups, optimizer.fp32_from_float16_groups
    mains = [list(group["params"]) for group in optimizer.optimizer.param_groups]
    model = {
        id(main): param
        for params, copies in zip(*before, strict=True)
        for param, main in zip(params, copies, strict=True)
    }
    optimizer.float16_groups = [[model.get(id(main), main) for main in group] for group in mains]
    optimizer.fp32_from_float16_groups = mains
    try:
        yield
    finally:
        optimizer.float16_groups, optimizer.fp32_from_float16_groups = before


PATCH = Patch(
    name="float32_parameters",
    targets=(_SHARDED, _LOAD, _RANGES),
    why=(
        "megatron/core/optimizer/optimizer.py:1150 numbers float16_groups alone, and :1169 takes these numbers "
        "for those of the inner optimizer, which has the parameters of fp32_from_fp32_groups as well; "
        "megatron/core/optimizer/distrib_optimizer.py:337 keeps the places of the parameters in the buffers, and "
        ":488 puts those in float32 before the others"
    ),
    change=_change,
    signature={
        _SHARDED: ("model_sharded_state_dict", "is_loading", "metadata"),
        _LOAD: ("state_dict",),
        _RANGES: ("param_groups", "gbuf_ranges"),
    },
)
