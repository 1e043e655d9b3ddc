"""Makes every TP rank allocate the rows that are sent in validation under ``--eval-micro-batch-size``."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from megasched.attributes import Undo, resolve, wrap_attribute
from megasched.patches.registry import Patch

_TARGET = "megatron.core.utils:get_batch_on_this_tp_rank"


def _change() -> Undo:
    signature = inspect.signature(resolve(_TARGET))

    def get_batch_on_this_tp_rank(real: Callable[..., Any], /, *given: Any, **named: Any) -> Any:
        import torch
        from megatron.training.global_vars import get_args

        call = signature.bind(*given, **named)
        args = get_args()
        # Megatron's `evaluate` is what calls it without gradients; scripts give the size of training everywhere.
        if not torch.is_grad_enabled() and call.arguments["micro_batch_size"] == args.micro_batch_size:
            call.arguments["micro_batch_size"] = args.eval_micro_batch_size
        return real(*call.args, **call.kwargs)

    return wrap_attribute(_TARGET, get_batch_on_this_tp_rank, rebind=("megatron", "megasched"))


PATCH = Patch(
    name="eval_batch",
    targets=(_TARGET,),
    why=(
        "pretrain_gpt.py of 0.19 has megatron/core/utils.py:2119 make room for --micro-batch-size rows, in "
        "validation as well; with another --eval-micro-batch-size the TP ranks beside the first have room for too "
        "few, or wait for more, and the run ends"
    ),
    change=_change,
    signature={_TARGET: ("micro_batch_size",)},
)
