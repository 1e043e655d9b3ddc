"""Makes DeepSpeed's pipeline of a scheduled model: a ``PipelineModule`` whose layers are stages, one a rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from megasched.dialects.deepspeed.config import refuse_all, value_at, zero_stage
from megasched.dialects.stages import Loss, build_stage
from megasched.errors import ConfigError
from megasched.language.schedule import Schedule


def make_pipeline(schedule: Schedule, config: Mapping[str, Any], loss_fn: Loss | None) -> nn.Module:
    """Builds this rank's stage of a scheduled model, and DeepSpeed's ``PipelineModule`` of it.

    Args:
        loss_fn: of logits [b, s, v] and labels; by default the definition's own.

    Raises:
        ConfigError: the config asks for what a pipeline does not have, or Megatron's groups have another order.
        ScheduleError: with every problem found, such as layers that can't be cut into stages.
    """
    from deepspeed.pipe import PipelineModule
    from megatron.core import parallel_state

    _refuse(config)
    topology = _topology()
    stage = build_stage(schedule)
    layers: list[nn.Module] = [nn.Identity() for _ in range(topology.get_dim("pipe"))]
    layers[stage.index] = stage
    loss_fn = loss_fn or stage.loss
    pipeline: nn.Module = PipelineModule(layers, topology=topology, loss_fn=loss_fn, partition_method="uniform")
    for name in stage.copies:
        stage.get_parameter(name).ds_pipe_replicated = True  # type: ignore[attr-defined]  # left out of the norm
    group = parallel_state.get_embedding_group() if stage.shared else None
    tied = [(stage.get_parameter(name), group) for name in stage.shared]
    # DeepSpeed ties whole layers (TiedLayerSpec), and HF single parameters.
    pipeline.get_tied_weights_and_groups = lambda: tied  # type: ignore[assignment]
    return pipeline


def _refuse(config: Mapping[str, Any]) -> None:
    """Raises ConfigError, with every key of a config by which DeepSpeed's pipelines fail or are wrong."""
    stage, problems = zero_stage(config), []
    if stage > 1:
        problems.append(f"zero_optimization.stage = {stage}: DeepSpeed's pipelines take 0 or 1")
    if stage == 0 and value_at(config, "gradient_clipping"):
        what = (
            "zero_optimization.stage = 0 with gradient_clipping: DeepSpeed leaves norms and biases of later stages"
        )
        problems.append(f"{what} out of the norm, and counts tied parameters twice; take stage 1")
    if value_at(config, "pipeline.activation_checkpoint_interval"):
        what = "pipeline.activation_checkpoint_interval: a stage is one layer to DeepSpeed"
        problems.append(f"{what}; call sch['model.layers.*'].checkpoint() instead")
    if value_at(config, "checkpoint.load_universal"):
        problems.append("checkpoint.load_universal: the names in a pipeline's checkpoint are those of its stages")
    refuse_all(problems, "a pipeline")


def _topology() -> Any:
    """Returns Megatron's groups as DeepSpeed's topology: stages outermost, TP innermost.

    Raises:
        ConfigError: Megatron's groups have another order.
    """
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
    from megatron.core import parallel_state

    groups = {
        "pipe": parallel_state.get_pipeline_model_parallel_group(),
        "data": parallel_state.get_data_parallel_group(),
        "model": parallel_state.get_tensor_model_parallel_group(),
    }
    pp, dp, tp = (group.size() for group in groups.values())
    topology = PipeModelDataParallelTopology(num_pp=pp, num_dp=dp, num_mp=tp)
    for axis, group in groups.items():
        ranks = torch.distributed.get_process_group_ranks(group)
        if ranks not in topology.get_axis_comm_lists(axis) and len(ranks) > 1:
            what = f"Megatron's groups have another order than DeepSpeed's: the {axis} group here is {ranks}"
            raise ConfigError(f"{what}; leave out initialize_model_parallel(order=)")
    return topology
