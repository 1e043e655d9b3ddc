"""Checks a checkpoint before it is loaded."""

from __future__ import annotations

from functools import partial, wraps
from typing import Any

from megasched.attributes import Undo, resolve, set_attribute
from megasched.patches.registry import Patch
from megasched.trainer.current_session import get_session, has_session

_TARGET = "megatron.training.training:load_checkpoint"


def _change() -> Undo:
    load = resolve(_TARGET)

    @wraps(load)
    def load_checked(ddp_model: Any, *given: Any, load_arg: str = "load", **named: Any) -> Any:
        from megatron.training.global_vars import get_args

        from megasched.trainer.checkpoint.load_check import loaded
        from megasched.trainer.checkpoint.one_writer import FORMAT

        call, args = partial(load, ddp_model, *given, load_arg=load_arg, **named), get_args()
        if args.ckpt_format != FORMAT or not has_session():
            return call()
        return loaded(call, ddp_model, args, get_session(), load_arg)

    return set_attribute(_TARGET, load_checked)


PATCH = Patch(
    name="load_check",
    targets=(_TARGET,),
    why=(
        "megatron/core/dist_checkpointing/serialization.py:152 loads without looking for keys that are too many, "
        "stops at the first one that is missing, and a damaged file is a traceback that does not name it; "
        "megatron/training/checkpointing.py:365 ends with status 0 where the tracker is damaged"
    ),
    change=_change,
    signature={_TARGET: ("ddp_model", "optimizer", "opt_param_scheduler", "load_arg")},
)
