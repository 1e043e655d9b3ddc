"""Defines the builder that stands for those of Megatron's own models (``seams/model_builder.py``)."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

from megatron.core.pipeline_parallel.utils import (
    is_pp_first_stage,
    is_pp_last_stage,
    is_vp_first_stage,
    is_vp_last_stage,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.training.models.base import ModelBuilder, compose_hooks
from megatron.training.models.dist_utils import unimodal_build_distributed_models
from torch import nn

from megasched.analysis.stages.layer_stack import LayerStack
from megasched.patches import host_cuda
from megasched.trainer.checkpoint.source import with_progress
from megasched.trainer.current_session import get_session
from megasched.trainer.flags.honoured_flags import MLA_UP_PROJ
from megasched.trainer.parameter_waits import wait_for_uncalled
from megasched.trainer.scheduled_model import ScheduledModel
from megasched.trainer.stages.shared_parameters import finalize_with_shared
from megasched.trainer.stages.stage import Stage
from megasched.trainer.token_ids import checked_ids
from megasched.trainer.unreached import watch_unreached
from megasched.trainer.weight_decay import spare, spared_names


class ScheduledModelBuilder(ModelBuilder):
    """Builds ``ScheduledModel`` chunks; the distributed wrapping around them is Megatron's own."""

    def build_model(
        self,
        pg_collection: ProcessGroupCollection,
        pre_process: bool | None = None,
        post_process: bool | None = None,
        vp_stage: int | None = None,
    ) -> Any:
        """Builds one model chunk of this rank."""
        config = self._model_config.transformer
        # With it Megatron sums gradients of parameters *named* q_layernorm or k_layernorm over TP
        # (megatron/core/distributed/finalize_model_grads.py:453); ours are summed where the placement says so.
        config.qk_layernorm = False
        # A GPU's shards are filled there; by this flag Megatron leaves a chunk that it is handed where it is
        # (megatron/training/models/dist_utils.py:172), and a rehearsal's is on the CPU.
        config.use_cpu_initialization = config.use_cpu_initialization and host_cuda.is_installed()
        vp_size, pp = config.virtual_pipeline_model_parallel_size, pg_collection.pp
        if pre_process is None:
            pre_process = is_vp_first_stage(vp_stage=vp_stage, vp_size=vp_size) and is_pp_first_stage(pp)
        if post_process is None:
            post_process = is_vp_last_stage(vp_stage=vp_stage, vp_size=vp_size) and is_pp_last_stage(pp)
        session = get_session()
        if session.recomputes_up_projections and MLA_UP_PROJ not in config.recompute_modules:
            config.recompute_modules = [*config.recompute_modules, MLA_UP_PROJ]
        if not session.plan.layout.mixture_flags:
            # Megatron wants it for expert parallelism; what it then scales is losses of its own routers alone.
            config.num_moe_experts = None
        structure = session.plan.stack
        assert session.source is not None
        made = stages_of_run(config, structure, pp.size())
        own = made[pp.size() * (vp_stage or 0) + pp.rank()]
        cuts = [stage.start for stage in made[1:]]
        packing = session.packing(cuts, config.params_dtype, session.batch_shape)
        if cuts:
            # Nothing but the shape of what is sent follows it any more: all sizes of layers are the definition's.
            config.hidden_size = session.sent_width(packing)
        stage = Stage(own.start, own.stop, pre_process, post_process)
        with with_progress(session.source, session.plan, stage, config.params_dtype) as source:
            chunk = ScheduledModel(
                config,
                session.copy_of_definition(),
                session.schedule,
                session.plan,
                stage,
                source,
                pg_collection=pg_collection,
                vp_stage=vp_stage,
                stages=made,
                packing=packing,
            )
        session.runs.let_go(session.plan.structure)
        watch_unreached(chunk.definition, session.reach.uncalled)
        spare(chunk.local_parameters().values(), spared_names(session.definition))
        keep_gradients_of_all_uses(chunk.definition)
        chunk.register_forward_pre_hook(checked_ids, with_kwargs=True)
        wait_for_uncalled(chunk, chunk.definition)
        if chunk.shared_copies():
            config.finalize_model_grads_func = finalize_with_shared(pp)
        return chunk

    def build_distributed_models(self, pg_collection: ProcessGroupCollection, **options: Any) -> list[Any]:
        """Builds this rank's chunks, wrapped for data parallelism as Megatron wraps its own.

        Args:
            options: the trainer's; each release of Megatron knows further ones.
        """
        model = self._model_config
        chunks = unimodal_build_distributed_models(
            self.build_model,
            model.transformer,
            pg_collection,
            pre_wrap_hook=compose_hooks(model.pre_wrap_hooks),
            **options,
        )
        made = compose_hooks(model.post_wrap_hooks)(chunks)
        return chunks if made is None else made  # a hook may change them in place, as Megatron's builders allow


def keep_gradients_of_all_uses(definition: nn.Module) -> None:
    """Marks parameters of several modules, such as a tied embedding, as Megatron marks that of its own models.

    A product that adds its gradient to ``main_grad`` itself (gradient accumulation fusion) returns a placeholder,
    and Megatron drops it with what else came back to the parameter, unless it is marked to be zeros
    (``core/distributed/distributed_data_parallel.py:491``).
    """
    seen = set[nn.Parameter]()
    for _, parameter in definition.named_parameters(remove_duplicate=False):
        if parameter in seen:
            parameter.zero_out_wgrad = True
        seen.add(parameter)


def stages_of_run(config: Any, structure: LayerStack, pp: int) -> list[Stage]:
    """Returns all stages, in the order in which the model runs.

    Args:
        config: Megatron's ``TransformerConfig`` of the run.
        structure: layer stack of the definition.
    """
    # Megatron counts calls of layers that are called several times, and no stage holds a part of them.
    found = [(0, structure.count)] if structure.repeated else _stages(config, pp)
    return [Stage(*layers, index == 0, index == len(found) - 1) for index, layers in enumerate(found)]


def _stages(config: Any, pp: int) -> list[tuple[int, int]]:
    """Returns the half-open range of layers of every stage, in the order in which the model runs."""
    vp_size = config.virtual_pipeline_model_parallel_size
    chunks: list[int | None] = [None] if vp_size is None else list(range(vp_size))
    counts = [_layers(config, chunk, rank) for chunk in chunks for rank in range(pp)]
    return list(pairwise([0, *accumulate(counts)]))


def _layers(config: Any, vp_stage: int | None, pp_rank: int) -> int:
    """Returns the number of layers that a model chunk of a rank has."""
    layout = config.pipeline_model_parallel_layout
    if layout is None:
        return get_num_layers_to_build(config, vp_stage=vp_stage, pp_rank=pp_rank)
    # Megatron's function forgets the rank that it is given here (core/transformer/transformer_block.py:86).
    return layout.get_num_layers_to_build(layer_type=LayerType.decoder, vp_stage=vp_stage, pp_rank=pp_rank)
