"""Makes Megatron's log count the FLOPs of the definition that is trained, not of a GPT of its sizes."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from megasched.attributes import Undo, wrap_attribute
from megasched.definition.objectives import CAUSAL_LM, objective_of
from megasched.errors import MegaschedError
from megasched.patches.registry import Patch
from megasched.trainer.current_session import get_session, has_session

_TARGET = "megatron.training.training:num_floating_point_operations"


def _change() -> Undo:
    failed: list[MegaschedError] = []

    def of_definition(
        count: Callable[..., float], args: Any, batch_size: float, *lengths: Any, **named: Any
    ) -> float:
        known = has_session() and objective_of(get_session().definition) is CAUSAL_LM
        if known and not failed:
            try:
                return batch_size * get_session().training_flops
            except MegaschedError as error:  # a log line is no reason to end a run
                failed.append(error)
                warnings.warn(f"TFLOP/s in the log are those of a GPT of these sizes: {error}", stacklevel=2)
        return count(args, batch_size, *lengths, **named)

    return wrap_attribute(_TARGET, of_definition)


PATCH = Patch(
    name="model_flops",
    targets=(_TARGET,),
    why=(
        "megatron/training/training.py:390 has one formula for a GPT, from Megatron's own flags: it knows no "
        "sliding windows, no mixture that HF's class routes by itself and no state-space layers, so TFLOP/s in "
        "the log (--log-throughput) would be another model's"
    ),
    change=_change,
    signature={_TARGET: ("args", "batch_size")},
)
