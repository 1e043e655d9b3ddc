"""The model builder on Megatron's official extension point: ``GPTModelConfig.builder`` names this class."""

from __future__ import annotations

from typing import Any

from megatron.core.pipeline_parallel.utils import (
    is_pp_first_stage,
    is_pp_last_stage,
    is_vp_first_stage,
    is_vp_last_stage,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from megatron.training.models.gpt import GPTModelBuilder

from megasched.megatron.scheduled_model import ScheduledModel
from megasched.megatron.session import get_session
from megasched.megatron.stage import Stage


class ScheduledModelBuilder(GPTModelBuilder):
    """Builds ``ScheduledModel`` chunks; the distributed wrapping around them is Megatron's own."""

    def build_model(
        self,
        pg_collection: ProcessGroupCollection,
        pre_process: bool | None = None,
        post_process: bool | None = None,
        vp_stage: int | None = None,
    ) -> Any:
        """One model chunk of this rank."""
        config = self._model_config.transformer
        # With it Megatron sums gradients of parameters *named* q_layernorm or k_layernorm over TP
        # (megatron/core/distributed/finalize_model_grads.py:453); ours are summed where the placement says so.
        config.qk_layernorm = False
        # Megatron wants it for expert parallelism; what it then scales and logs is of its own router alone.
        config.num_moe_experts = None
        vp_size, pp = config.virtual_pipeline_model_parallel_size, pg_collection.pp
        if pre_process is None:
            pre_process = is_vp_first_stage(vp_stage=vp_stage, vp_size=vp_size) and is_pp_first_stage(pp)
        if post_process is None:
            post_process = is_vp_last_stage(vp_stage=vp_stage, vp_size=vp_size) and is_pp_last_stage(pp)
        start = get_transformer_layer_offset(config, vp_stage, pp_rank=pp.rank())
        count = get_num_layers_to_build(config, vp_stage=vp_stage, pp_rank=pp.rank())
        session = get_session()
        structure = session.plan.structure
        assert session.source is not None
        assert structure is not None
        if structure.repeated:  # Megatron counts calls, and no stage holds a part of them
            count = structure.count
        return ScheduledModel(
            config,
            session.copy_of_definition(),
            session.schedule,
            session.plan,
            Stage(start, start + count, pre_process, post_process),
            session.source,
            pg_collection=pg_collection,
            vp_stage=vp_stage,
        )
