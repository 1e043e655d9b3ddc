"""``build`` for any ``nn.Module``: the schedule carried out in place, in this process's TP group."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from megasched.errors import Problem, ScheduleError
from megasched.lowering import attention
from megasched.lowering.plan import Plan, make_plan
from megasched.lowering.replacement import replace_modules
from megasched.schedule import Schedule


def build(schedule: Schedule, *, inputs: Mapping[str, Any] | None = None) -> nn.Module:
    """Carries out a schedule on its model and returns the model, with its own signature and outputs.

    Real weights stay what they are: sharded from the values they have, never re-initialised, untied or
    unfrozen. Weights deferred by ``init_empty_weights`` stay deferred.

    Args:
        schedule: of any module, HF or not.
        inputs: example keyword arguments of the model's forward, from which what must be communicated is
            derived (their values do not matter). An HF causal language model needs none.

    Raises:
        ScheduleError: with every problem found; the model is unchanged then.
    """
    model = schedule.mod
    if schedule.path:
        raise ScheduleError(Problem("build takes the schedule of the whole model", schedule.path))
    inputs = inputs if inputs is not None else _own_inputs(model)
    _use_our_attention(model)
    make_plan(schedule, inputs=inputs)
    replace_modules(schedule, model)
    plan = make_plan(schedule, model=model, inputs=inputs)
    _lower_here(schedule, model, plan)
    if plan.records_of("checkpoint") and hasattr(model, "config"):
        model.config.use_cache = False  # a layer run again would append to the cache again, as HF notes too
    return model


def _own_inputs(model: nn.Module) -> dict[str, Any] | None:
    """Token ids, for an HF model that generates text."""
    if getattr(model, "can_generate", None) is None or not hasattr(model, "config"):
        return None
    return {"input_ids": torch.zeros(2, 5, dtype=torch.long)}


def _use_our_attention(model: nn.Module) -> None:
    """HF models call attention by name; ours is exchanged for theirs where they do."""
    config = getattr(model, "config", None)
    if hasattr(config, "_attn_implementation"):
        attention.register()
        config._attn_implementation = attention.NAME


def _lower_here(schedule: Schedule, model: nn.Module, plan: Plan) -> None:
    from megatron.core import parallel_state
    from megatron.core.model_parallel_config import ModelParallelConfig

    from megasched.lowering.context import Context
    from megasched.lowering.lower import lower

    first = next(model.parameters(), torch.empty(0))
    grouped = parallel_state.model_parallel_is_initialized()
    if not grouped:
        plan.cuts.clear()
    context = Context(
        plan=plan,
        group=parallel_state.get_tensor_model_parallel_group() if grouped else _Alone(),
        config=ModelParallelConfig(params_dtype=first.dtype, tensor_model_parallel_size=plan.layout.tp),
        source=None,
        device=torch.device("cpu") if first.device.type == "meta" else first.device,
        megatron_finalizes=False,
    )
    lower(schedule, model, context, lambda path: True)


class _Alone:
    """Stands for a TP group in a process without process groups."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1
