"""Builds a scheduled model and makes DeepSpeed's engine of it, by DeepSpeed's own ``initialize``."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megasched.dialects.deepspeed.config import check_by_deepspeed, read_config, zero_stage
from megasched.dialects.deepspeed.mpu import ModelParallelUnit
from megasched.dialects.deepspeed.pipeline import make_pipeline
from megasched.dialects.deepspeed.universal import describe_shards
from megasched.dialects.stages import Loss
from megasched.errors import ConfigError
from megasched.language.parallel_dims import ParallelDims
from megasched.language.schedule import Schedule
from megasched.lowering.build import build, placements_of
from megasched.lowering.groups import refuse_unscheduled
from megasched.patches import registry
from megasched.weights.random_init import Initialiser

# The model, its optimizer, the loader of training data, the scheduler of the learning rate.
type Engine = tuple[Any, Any, Any, Any]
type Parameters = Iterable[nn.Parameter] | Iterable[Mapping[str, Any]]


def initialize(
    schedule: Schedule,
    *,
    config: str | Path | Mapping[str, Any],
    optimizer: torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer] | None = None,
    model_parameters: Parameters | None = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    collate_fn: Callable[..., Any] | None = None,
    inputs: Mapping[str, Any] | None = None,
    loss_fn: Loss | None = None,
    init_weights: Initialiser | None = None,
) -> Engine:
    """Builds the model and returns ``(engine, optimizer, loader, scheduler)``, as DeepSpeed's own function does.

    Megatron's groups are made for the schedule's layout where there are none. Over data parallelism ZeRO shards
    what a rank has of the model after it was cut over TP. With pipeline stages the engine is DeepSpeed's
    ``PipelineEngine``, whose ``train_batch`` takes pairs of token ids and labels, each [b, s].

    Args:
        schedule: schedule of a whole model; one that is built already is taken as it is.
        config: DeepSpeed's config, or its JSON file.
        optimizer: a function of the parameters, as ``build`` makes new ones; one that exists only with a schedule
            that was built before. By default that of the config.
        model_parameters: what is trained, of a schedule that was built before; by default all that is not frozen.
        training_data, lr_scheduler, collate_fn: as for ``deepspeed.initialize``.
        inputs, init_weights: as for ``megasched.build``.
        loss_fn: of logits [b, s, v] and labels, for pipeline stages; by default the definition's own.

    Raises:
        ConfigError: the config asks for what a scheduled model or DeepSpeed does not have, or the optimizer has
            parameters that are not the model's.
        ScheduleError: with every problem found; the model is unchanged then.
    """
    refuse_unscheduled(schedule)
    settings = read_config(config)
    deepspeed = _with_groups(schedule, settings)
    staged = schedule.layout.pp > 1
    if staged and schedule.layout.sp:  # DeepSpeed sends a part by each TP rank of what it takes to be the same
        sent_whole = {"pipe_partitioned": False, "grad_partitioned": False}
        settings["pipeline"] = {**settings.get("pipeline", {}), **sent_whole}
    _check_options(staged, inputs, loss_fn, init_weights)
    if staged:
        model = make_pipeline(schedule, settings, loss_fn)
    else:
        model = _whole_model(schedule, settings, inputs, init_weights)
    _check_parameters(model, optimizer, model_parameters)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine: Engine = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        model_parameters=trained if model_parameters is None else model_parameters,
        training_data=training_data,
        lr_scheduler=lr_scheduler,
        collate_fn=collate_fn,
        mpu=None if staged else ModelParallelUnit(),
        config=settings,
    )
    return engine


def _refuse_layout(layout: ParallelDims) -> None:
    """Raises ConfigError for ranks that DeepSpeed would take for replicas, and which are none."""
    ep = "ZeRO takes data-parallel ranks for replicas of all parameters, and each EP rank has other experts"
    cp = "DeepSpeed gives each rank samples of its own, and CP ranks share a sequence"
    for name, size, why in (("EP", layout.ep, ep), ("CP", layout.cp, cp)):
        if size > 1:
            remedy = f"train it by DDP or FSDP2, or make the groups without {name}"
            raise ConfigError(f"{name} {size}: {why}; {remedy}")


def _whole_model(
    schedule: Schedule,
    config: Mapping[str, Any],
    inputs: Mapping[str, Any] | None,
    init_weights: Initialiser | None,
) -> nn.Module:
    """Builds a model without pipeline stages, if it is not built yet."""
    if zero_stage(config) == 3:
        _take_leaf(schedule)
    if not schedule.built:
        build(schedule, inputs=inputs, init_weights=init_weights)
    describe_shards(schedule.mod, placements_of(schedule.mod), schedule.layout.tp)
    return schedule.mod


def imported() -> Any:
    """Imports DeepSpeed, on the CPU in a rehearsal, where torch says that there is CUDA.

    Raises:
        ConfigError: it is not installed, or was imported for another accelerator before.
    """
    rehearsing = "host_cuda" in registry.active()
    if rehearsing and "deepspeed" not in sys.modules:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        import deepspeed
        from deepspeed.accelerator import get_accelerator
        from deepspeed.ops import __compatible_ops__
    except ImportError as error:
        raise ConfigError("DeepSpeed is not installed: pip install 'megasched[deepspeed]'") from error
    accelerator = get_accelerator().device_name()
    if rehearsing and accelerator != "cpu":
        what = f"this is a rehearsal on the CPU, and DeepSpeed was imported for {accelerator!r}"
        raise ConfigError(f"{what}: set DS_ACCELERATOR=cpu before")
    if accelerator == "cpu":
        __compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled at the start of every rank
    return deepspeed


def _with_groups(schedule: Schedule, settings: Mapping[str, Any]) -> Any:
    """Imports DeepSpeed, makes Megatron's groups for the layout if there are none, and checks the config by both.

    Raises:
        ConfigError: the layout or the config can't be used.
    """
    _refuse_layout(schedule.layout)
    deepspeed = imported()
    from megatron.core import parallel_state

    deepspeed.init_distributed()
    if not parallel_state.model_parallel_is_initialized():
        sizes = {
            "tensor_model_parallel_size": schedule.layout.tp,
            "pipeline_model_parallel_size": schedule.layout.pp,
        }
        parallel_state.initialize_model_parallel(**sizes)
    check_by_deepspeed(deepspeed, settings, ModelParallelUnit(), schedule.layout.tp)
    if zero_stage(settings) == 3:  # it loads universal checkpoints by groups of its own (zero/stage3.py:3787)
        tp = parallel_state.get_tensor_model_parallel_world_size()
        deepspeed.utils.groups._init_tp_mesh_device(tensor_model_parallel_size=tp)
    return deepspeed


def _check_options(staged: bool, inputs: Any, loss_fn: Any, init_weights: Any) -> None:
    """Raises ConfigError where an option is given that would not be used."""
    if staged and inputs is not None:
        raise ConfigError("inputs=: pipeline stages are made of HF's causal language models, which need none")
    if staged and init_weights is not None:
        raise ConfigError("init_weights=: megasched.materialize fills the deferred weights of pipeline stages")
    if not staged and loss_fn is not None:
        raise ConfigError("loss_fn=: without pipeline stages the model's own forward returns the loss")


def _take_leaf(schedule: Schedule) -> None:
    """Has every module compute by itself: ZeRO-3 gathers the weights of a module when that is called.

    Raises:
        ConfigError: the schedule asks for another level, or was built at another.
    """
    asked = [r for r in schedule.records if r.primitive == "level" and r.arguments.get("required", True)]
    others = [
        f"{r.path or 'the model'}: {r.arguments['name']} ({r.source})"
        for r in asked
        if r.arguments["name"] != "leaf"
    ]
    if others:
        what = "zero_optimization.stage = 3 has the weights of a module only while it runs; other levels read more"
        raise ConfigError(f"{what}: {', '.join(others)}; take level leaf, or stage 2")
    if any(not record.path for record in asked):
        return
    if schedule.built:
        what = "zero_optimization.stage = 3 has the weights of a module only while it runs"
        raise ConfigError(
            f"{what}, and the schedule was built at level fused; call sch.level('leaf') before, or take stage 2"
        )
    warnings.warn("megasched: level leaf, for zero_optimization.stage = 3", stacklevel=4)
    schedule.root.level("leaf")


def _check_parameters(model: nn.Module, optimizer: Any, model_parameters: Any) -> None:
    """Raises ConfigError where an optimizer or a list has parameters that the built model does not."""
    held = {id(parameter) for parameter in model.parameters()}
    groups = getattr(optimizer, "param_groups", None) if isinstance(optimizer, torch.optim.Optimizer) else None
    for name, given in (("optimizer", groups), ("model_parameters", model_parameters)):
        if given is None:
            continue
        if not isinstance(given, list | tuple):
            raise ConfigError(f"{name}= is {type(given).__name__}: give a list, which can be read twice")
        parameters = [p for group in given for p in (group["params"] if isinstance(group, Mapping) else [group])]
        if any(id(parameter) not in held for parameter in parameters):
            what = f"{name}= has parameters that the built model does not: build makes new ones of what it cuts"
            raise ConfigError(f"{what}; give a function of the parameters, or build the schedule before")
