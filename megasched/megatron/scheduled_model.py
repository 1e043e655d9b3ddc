"""``ScheduledModel``: one stage of a scheduled definition, as Megatron's trainer wants a model chunk to be."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group
from megatron.core.utils import make_viewless_tensor
from torch import nn

from megasched.assembly import Assembly
from megasched.errors import ConfigError
from megasched.lowering.context import Context
from megasched.lowering.context_masks import context_masks
from megasched.lowering.context_parallel import ContextParallel
from megasched.lowering.fp8 import enter_fp8, fp8_pass
from megasched.lowering.lower import lower, lower_sequence_boundaries
from megasched.megatron.checkpoint import Place, refuse_mismatch, sharded_entry
from megasched.megatron.loss import VocabParallelLoss
from megasched.megatron.recompute_flags import apply_recompute_flags
from megasched.megatron.stage import Stage, StageEnd, Wire, make_stage, set_entry, set_exit

if TYPE_CHECKING:
    from megasched.lowering.plan import Plan
    from megasched.schedule import Schedule
    from megasched.weights.source import WeightSource

_PREFIX = "definition."


class ScheduledModel(MegatronModule):
    """A definition, lowered for this rank's stage.

    Attributes:
        definition: the HF model; modules of other stages are hollow.
        pre_process, post_process, vp_stage, pg_collection, input_tensor: as Megatron's trainer reads them.
    """

    def __init__(
        self,
        config: TransformerConfig,
        definition: nn.Module,
        schedule: Schedule,
        plan: Plan,
        stage: Stage,
        source: WeightSource,
        *,
        pg_collection: ProcessGroupCollection,
        vp_stage: int | None = None,
    ) -> None:
        super().__init__(config)
        self.definition = definition
        self.plan, self.stage, self.vp_stage, self.pg_collection = plan, stage, vp_stage, pg_collection
        self.pre_process, self.post_process = stage.first, stage.last
        self.input_tensor: torch.Tensor | None = None
        self._wire = Wire()
        self._positions_checked = False
        self._device = _device(config)
        self._context = ContextParallel(pg_collection.cp) if plan.layout.cp > 1 else None
        self._build(schedule, source)
        self._tie()

    def _build(self, schedule: Schedule, source: WeightSource) -> None:
        plan, structure = self.plan, self.plan.structure
        assert structure is not None
        context = Context(
            plan=plan,
            group=self.pg_collection.tp,
            expert_group=self.pg_collection.ep,
            config=self.config,
            source=source,
            device=self._device,
            megatron_finalizes=True,
            context_parallel=self._context,
        )
        self._assemblies = context.assemblies
        make_stage(self.definition, structure, self.stage, self._wire, self.config.params_dtype)
        here = self._here
        lower(schedule, self.definition, context, here)
        apply_recompute_flags(self.definition, structure, self.stage, self.config)
        enter_fp8(self.definition, plan, self.config, here)
        if not self.stage.empty:
            set_entry(self.definition, structure, self.stage, self._wire)
            lower_sequence_boundaries(self.definition, context, here, first=self.stage.first, last=self.stage.last)
            set_exit(self.definition, structure, self.stage)
        self._fill_buffers(source)
        head = _path_of(self.definition, self.definition.get_output_embeddings()) if self.stage.last else ""
        sharded = plan.cuts.get(head) == "column" and head not in plan.derived.gather
        vocabulary = plan.placement(head, "weight").shape[0] if self.stage.last else 0
        self._loss = VocabParallelLoss(vocabulary, sharded, self.pg_collection.tp)
        self.definition.loss_function = self._loss

    def _here(self, path: str) -> bool:
        assert self.plan.structure is not None
        return self.stage.holds(self.plan.structure, path)

    def _fill_buffers(self, source: WeightSource) -> None:
        for name, buffer in list(self.definition.named_buffers()):
            value = source.buffer(name) if self._here(name.rpartition(".")[0]) else None
            if value is not None:
                buffer.copy_(value)
        for module in self.definition.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = buffer.to(self._device)

    # embeddings -------------------------------------------------------------------------------------

    def _tie(self) -> None:
        """Marks tied and embedding weights as Megatron's LanguageModule does
        (megatron/core/models/common/language_module/language_module.py)."""
        canonical = self.plan.canonical
        names = [_name_of(self.definition, get()) for get in self._embeddings()]
        self.share_embeddings_and_output_weights = canonical[names[0]] == canonical[names[1]]
        for weight, here in zip(self._weights(), (self.stage.first, self.stage.last), strict=True):
            if here and weight is not None:
                weight.is_embedding_or_output_parameter = True
        if self.share_embeddings_and_output_weights and self.config.pipeline_model_parallel_size > 1:
            weight = self.shared_embedding_or_output_weight() if self.stage.first or self.stage.last else None
            if weight is not None:
                weight.shared_embedding = True
                weight.shared = not self.stage.first

    def _embeddings(self) -> tuple[Callable[[], nn.Module], Callable[[], nn.Module]]:
        return self.definition.get_input_embeddings, self.definition.get_output_embeddings

    def _weights(self) -> tuple[nn.Parameter, nn.Parameter]:
        first, last = (get() for get in self._embeddings())
        return first.weight, last.weight

    def shared_embedding_or_output_weight(self) -> torch.Tensor | None:
        """The tied weight on this stage, whose gradient Megatron sums over the embedding group."""
        embedding, head = self._weights()
        if self.stage.first:
            return embedding
        return head if self.stage.last else None

    # forward ----------------------------------------------------------------------------------------

    def set_input_tensor(self, input_tensor: Any) -> None:
        """Megatron hands over what the previous stage sent: [s (/ tp under SP), b, h]."""
        self.input_tensor = input_tensor[0] if isinstance(input_tensor, list) else input_tensor

    def forward(
        self,
        input_ids: torch.Tensor | None,
        position_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        loss_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """One micro-batch through this stage; under context parallelism s is a rank's part of the sequence.

        Args:
            input_ids: [b, s] on the first stage.
            position_ids, attention_mask: not used: one causal sequence a row, positions from 0, as the
                definition makes them by itself, or those of this rank's part.
            labels: [b, s] on the last stage, shifted already.

        Returns:
            [s (/ tp under SP), b, h] for the next stage; on the last one the loss of each token [b, s], or the
            logits [b, s, v] when there are no labels.
        """
        if self.stage.empty:
            assert self.input_tensor is not None
            return self.input_tensor.clone()
        if kwargs.get("packed_seq_params") is not None:
            raise ConfigError("packed sequences: the definition sees one causal sequence a row; leave --sft out")
        ids = self._receive(input_ids)
        structure = self.plan.structure
        calls_loss = structure is not None and structure.calls_loss
        try:
            given = {"labels": labels} if calls_loss else {}
            given |= self._positions(ids, position_ids)
            with fp8_pass(self.config), self._masks():
                output = self.definition(input_ids=ids, use_cache=False, **given)
        except StageEnd as end:
            return self._send(end.hidden)
        finally:
            self._wire.received = None
        if labels is None:
            return self._loss.whole(output.logits)
        return output.loss if calls_loss else self._loss(output.logits, labels)

    def _receive(self, input_ids: torch.Tensor | None) -> torch.Tensor:
        """Token ids for the definition's forward: the real ones, or zeros of the batch's shape."""
        if self.stage.first:
            assert input_ids is not None
            return input_ids
        assert self.input_tensor is not None
        hidden = self.input_tensor.transpose(0, 1).contiguous()  # definitions may view it
        parts = self.pg_collection.tp.size() if self.plan.layout.sp else 1
        wire = self._wire
        wire.received, wire.device = hidden, hidden.device
        wire.batch, wire.length = hidden.shape[0], hidden.shape[1] * parts
        return torch.zeros(wire.batch, wire.length, dtype=torch.long, device=wire.device)

    def _masks(self) -> AbstractContextManager[None]:
        if self._context is None:
            return nullcontext()
        return context_masks(self._context.zigzag, self._context.gather)

    def _positions(self, ids: torch.Tensor, given: torch.Tensor | None) -> dict[str, torch.Tensor]:
        """Places of this rank's tokens in the sequence, which a definition can't know by itself."""
        sequence = self.plan.sequence
        if self._context is None or sequence is None:
            return {}
        self._context.batch = ids.shape[0]
        positions = self._context.zigzag.positions(ids.shape[1], ids.device).expand(ids.shape).contiguous()
        if given is not None and not self._positions_checked:
            self._positions_checked = True  # once: it makes the CPU wait
            if not torch.equal(given, positions):
                raise ConfigError(
                    "position_ids of the batch are not those of context parallel rank "
                    f"{self._context.zigzag.rank}: split the batch with "
                    "megatron.core.utils.get_batch_on_this_cp_rank, and pack no sequences"
                )
        return {"position_ids": positions} if sequence.takes_positions else {}

    @staticmethod
    def _send(hidden: torch.Tensor) -> torch.Tensor:
        """[b, s, h] -> [s, b, h], no view: Megatron frees what it has sent."""
        out = hidden.transpose(0, 1).contiguous()
        return make_viewless_tensor(out, requires_grad=out.requires_grad, keep_graph=True)

    # precision --------------------------------------------------------------------------------------

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> ScheduledModel:
        """As ``nn.Module`` does it, but buffers that are no part of the state keep their dtype.

        Megatron's Float16Module casts the whole chunk; a rotary table in bfloat16 would be wrong at
        long range. HF itself computes these buffers in float32 and never casts them.
        """
        kept = [
            (module, name, module._buffers[name])
            for module in self.modules()
            for name in module._non_persistent_buffers_set
            if module._buffers[name] is not None
        ]
        super()._apply(fn, recurse)
        for module, name, before in kept:
            after = module._buffers[name]
            if after is not None and before is not None and after.dtype != before.dtype:
                module._buffers[name] = before.to(after.device)
        return self

    # checkpoints ------------------------------------------------------------------------------------

    def local_parameters(self) -> dict[str, tuple[nn.Parameter, Assembly]]:
        """Name in the lowered definition -> (this rank's parameter, the HF tensors it is made of); ties by their
        first local name."""
        return {
            name: (parameter, self._assemblies.get(name) or self._assembly_of(name))
            for name, parameter in self.definition.named_parameters()
        }

    def _assembly_of(self, name: str) -> Assembly:
        return Assembly((self.plan.placements[self.plan.canonical[name]],))

    def place(self, assembly: Assembly, dp_rank: int) -> Place:
        """Where this rank stands among those that share a parameter.

        Args:
            dp_rank: among the replicas of what is no expert.
        """
        groups = self.pg_collection
        if assembly.parts[0].group == "ep":
            return Place(groups.ep.rank(), groups.ep.size(), groups.expt_dp.rank())
        return Place(groups.tp.rank(), groups.tp.size(), dp_rank)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Entries under HF names with global shapes."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        dp_rank = metadata["dp_cp_group"].rank()
        entries: dict[str, Any] = {}
        shared = self.share_embeddings_and_output_weights and not self.stage.first
        for name, (parameter, assembly) in self.local_parameters().items():
            copy = shared and parameter is self.shared_embedding_or_output_weight()
            place = self.place(assembly, dp_rank)
            entries[prefix + _PREFIX + name] = sharded_entry(parameter, assembly, place, copy=copy)
        return entries

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Copies what was loaded into this rank's parameters; every name must be there, in its shape.

        Raises:
            CheckpointMismatch: ends the process, whatever ``strict`` says.
        """
        own = {_PREFIX + name: pair for name, pair in self.local_parameters().items()}
        given = {key: value for key, value in state_dict.items() if not key.endswith("_extra_state")}
        shapes = [
            f"{own[key][1].name}: {list(value.shape)} in the checkpoint, {list(own[key][0].shape)} here"
            for key, value in given.items()
            if key in own and value.shape != own[key][0].shape
        ]
        missing = [own[key][1].name for key in own if key not in given]
        refuse_mismatch(missing, [key for key in given if key not in own], shapes)
        with torch.no_grad():
            for key, (parameter, _) in own.items():
                parameter.copy_(given[key])
        return nn.modules.module._IncompatibleKeys([], [])


def _device(config: TransformerConfig) -> torch.device:
    if config.use_cpu_initialization:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def _path_of(model: nn.Module, wanted: nn.Module) -> str:
    return next(path for path, module in model.named_modules() if module is wanted)


def _name_of(model: nn.Module, wanted: nn.Module) -> str:
    return f"{_path_of(model, wanted)}.weight"
