"""Traces a run's timeline (``--megasched-trace``), as Megatron's timers tell neither when nor of what."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from megasched.attributes import Undo, resolve, wrap_attribute
from megasched.patches.registry import Patch
from megasched.trace.run_trace import RunTrace

_STEP = "megatron.training.training:train_step"
# Changed while a step is recorded, and at no other time (megasched/trace/hooks.py).
_FORWARD = "megatron.core.pipeline_parallel.schedules:forward_step"
_BACKWARD = "megatron.core.pipeline_parallel.schedules:backward_step"
_COMMUNICATE = "megatron.core.pipeline_parallel.p2p_communication:P2PCommunicator._communicate"


def _change() -> Undo:
    parameters = inspect.signature(resolve(_STEP))
    traces: list[RunTrace] = []

    def traced(train_step: Callable[..., Any], /, *positional: Any, **named: Any) -> Any:
        from megatron.training.global_vars import get_args

        args = get_args()
        if getattr(args, "megasched_trace", None) is None:
            return train_step(*positional, **named)
        if not traces:
            traces.append(RunTrace(args))
        given = parameters.bind(*positional, **named).arguments
        return traces[0].step(lambda: train_step(*positional, **named), given)

    return wrap_attribute(_STEP, traced)


PATCH = Patch(
    name="run_trace",
    targets=(_STEP, _FORWARD, _BACKWARD, _COMMUNICATE),
    why=(
        "--megasched-trace: megatron/core/pipeline_parallel/schedules.py:488,545 time forwards and backwards in "
        "sums (timers), with neither when each ran nor its micro-batch and chunk"
    ),
    change=_change,
    signature={
        _STEP: ("optimizer", "config", "iteration"),
        _FORWARD: ("current_microbatch", "vp_stage"),
        _BACKWARD: ("input_tensor", "output_tensor"),
        _COMMUNICATE: ("tensor_send_next", "tensor_send_prev", "recv_prev", "recv_next", "wait_on_reqs"),
    },
)
