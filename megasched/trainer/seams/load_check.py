"""Checks a checkpoint before it is loaded."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from megasched.attributes import Undo, wrap_attribute
from megasched.patches.registry import Patch
from megasched.trainer.current_session import get_session, has_session

_LOAD = "megatron.training.training:load_checkpoint"
_ARGUMENTS = "megatron.training.checkpointing:check_checkpoint_args"


def _change() -> list[Undo]:
    def load_checked(
        load: Callable[..., Any], ddp_model: Any, *given: Any, load_arg: str = "load", **named: Any
    ) -> Any:
        from megatron.training.global_vars import get_args

        from megasched.trainer.checkpoint.load_check import loaded

        call = partial(load, ddp_model, *given, load_arg=load_arg, **named)
        return loaded(call, ddp_model, get_args(), get_session(), load_arg) if has_session() else call()

    def arguments_checked(
        check_arguments: Callable[..., Any], checkpoint_args: Any, *given: Any, **named: Any
    ) -> Any:
        """Checks those that stand in no ``--save`` folder, too (``--non-persistent-ckpt-type local``)."""
        from megatron.training.global_vars import get_args

        from megasched.trainer.checkpoint.load_check import refuse_other_buffers

        args = get_args()
        if not args.no_load_optim:
            refuse_other_buffers(checkpoint_args, args)
        return check_arguments(checkpoint_args, *given, **named)

    return [wrap_attribute(_LOAD, load_checked), wrap_attribute(_ARGUMENTS, arguments_checked)]


PATCH = Patch(
    name="load_check",
    targets=(_LOAD, _ARGUMENTS),
    why=(
        "megatron/core/dist_checkpointing/serialization.py:152 loads without looking for keys that are too many, "
        "stops at the first one that is missing, and a damaged file is a traceback that does not name it; "
        "megatron/training/checkpointing.py:365 ends with status 0 where the tracker is damaged; states of an "
        "optimizer that lie as gradients do (:505) are read by a run in which gradients lie otherwise"
    ),
    change=_change,
    signature={
        _LOAD: ("ddp_model", "optimizer", "opt_param_scheduler", "load_arg"),
        _ARGUMENTS: ("checkpoint_args",),
    },
)
