"""Builds one stage of a model as a training run builds it, for a plan to look at."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from megasched.definition.module_copy import copy_module
from megasched.language.parallel_dims import ParallelDims
from megasched.plan.placement import Placement
from megasched.planner.stand_ins import kernels
from megasched.trainer.flags.model_shape import heads_for_tp, sizes_of

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megasched.trainer.scheduled_model import ScheduledModel
    from megasched.trainer.session import Session
    from megasched.trainer.stages.stage import Stage
    from megasched.trainer.stages.stage_transfer import BoundaryCodec


@dataclass(frozen=True)
class Setting:
    """Holds the settings of a run that decide, besides its layout, what a micro-batch costs.

    Attributes:
        sequence_length: length of whole sequences, before CP.
        dtype: dtype of parameters and activations.
        recompute_granularity: Megatron's: None, "selective" (attention's core) or "full" (whole layers).
        gradient_dtype: dtype of the gradients that Megatron sums and sends.
        on_gpu: whether kernels of a GPU, Transformer Engine's among them, take the place of a CPU's.
    """

    micro_batch_size: int
    sequence_length: int
    dtype: torch.dtype = torch.bfloat16
    recompute_granularity: str | None = None
    gradient_dtype: torch.dtype = torch.float32
    on_gpu: bool = False


def copy_with_layers(session: Session, kept: range) -> Any:
    """Copies the definition with the layers outside ``kept`` emptied, as a stage has no use for them."""
    structure = session.plan.stack
    memo: dict[int, Any] = {}
    for index in range(structure.count):
        if index not in kept:
            layer = session.replaced.get_submodule(structure.layer_path(index))
            empty = copy.copy(layer)
            empty._parameters, empty._buffers, empty._modules = {}, {}, {}
            memo[id(layer)] = empty
    return copy_module(session.replaced, memo)


def build_stage(
    session: Session, definition: Any, stage: Stage, setting: Setting, packing: BoundaryCodec | None
) -> ScheduledModel:
    from megatron.core.process_groups_config import ProcessGroupCollection

    from megasched.trainer.scheduled_model import ScheduledModel

    config = transformer_config(session, setting)
    if not (stage.first and stage.last):
        config.hidden_size = session.sent_width(packing)  # as the builder of a run has it
    model = ScheduledModel(
        config,
        definition,
        session.schedule,
        session.plan,
        stage,
        _NoValues(),
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
        packing=packing,
    )
    for path in session.plan.by_megatron:
        if stage.holds(session.plan.structure, path) and session.plan.in_8_bits(path):
            kernels.mark_8_bits(model.definition.get_submodule(path))
    _cast_buffers(model, setting.dtype)
    return model.train()


def _cast_buffers(model: ScheduledModel, dtype: torch.dtype) -> None:
    """Casts the buffers, as Megatron's Float16Module does it with the rest of a chunk.

    The parameters are made in their dtype. A cast would take from fake ones what Megatron notes on them: torch
    swaps subclasses of a tensor.
    """
    with model.keeping_precision():
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.is_floating_point():
                    module._buffers[name] = buffer.to(dtype)


def transformer_config(session: Session, setting: Setting) -> TransformerConfig:
    from megatron.core.transformer.transformer_config import TransformerConfig

    layout = session.plan.layout
    sizes = heads_for_tp(sizes_of(session.definition), layout.tp)
    full = setting.recompute_granularity == "full"
    return TransformerConfig(
        num_layers=session.plan.structure.count,  # type: ignore[union-attr]
        hidden_size=sizes["hidden_size"].value,
        num_attention_heads=sizes["num_attention_heads"].value,
        tensor_model_parallel_size=layout.tp,
        sequence_parallel=layout.sp,
        context_parallel_size=layout.cp,
        use_cpu_initialization=True,
        params_dtype=setting.dtype,
        pipeline_dtype=setting.dtype,
        bf16=setting.dtype == torch.bfloat16,
        recompute_granularity=setting.recompute_granularity,
        recompute_method="uniform" if full else None,
        recompute_num_layers=1 if full else None,
        **(_on_gpu(layout) if setting.on_gpu else {}),
    )


def _on_gpu(layout: ParallelDims) -> dict[str, Any]:
    """Returns Megatron's defaults for arguments where there is a GPU, and what a layout asks for."""
    found: dict[str, Any] = {"bias_activation_fusion": True, "apply_rope_fusion": True}
    if layout.fp8 is not None:
        found |= {"fp8": "hybrid", "fp8_recipe": layout.fp8.fp8_recipe}
    return found


class _NoValues:
    """Serves as the weight source of parameters without values; see ``megasched.weights.source.WeightSource``."""

    def local(self, placement: Placement, rank: int, size: int) -> torch.Tensor:
        return torch.zeros(()).expand(placement.local_shape(size))

    def buffer(self, name: str) -> None:
        return None

    def check(self, names: Any) -> None:
        return None
