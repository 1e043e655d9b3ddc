"""Defines ``ScheduledModel``: one stage of a scheduled definition, as a model chunk of Megatron's trainer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group
from torch import nn

from megasched.definition.build import buffers_following_dtype, kept_in_float32
from megasched.definition.mask_interface import context_masks, packed_masks
from megasched.definition.objectives import objective_of
from megasched.errors import ConfigError
from megasched.language.schedule import Schedule
from megasched.layers.build_context import BuildContext
from megasched.layers.context_parallel import CpGroup
from megasched.layers.te.fp8 import enter_fp8, fp8_pass
from megasched.lowering.lower import lower, lower_sequence_boundaries
from megasched.plan.param_mapping import ParamMapping
from megasched.plan.plan import Plan
from megasched.trainer.checkpoint.buffers import SavedBuffers, materialize_buffers, persistent_buffers
from megasched.trainer.checkpoint.entries import ShardOwner, copy_loaded, sharded_entry
from megasched.trainer.flags.recompute import apply_recompute_flags
from megasched.trainer.losses.definition_loss import DefinitionLoss
from megasched.trainer.losses.loss import VocabParallelLoss, make_loss
from megasched.trainer.packed_batch import as_rows, packed_arguments, unpack_rows
from megasched.trainer.precision import keeping_precision, with_nan
from megasched.trainer.stages.shared_parameters import shared_parameters
from megasched.trainer.stages.stage import (
    Stage,
    StageEnd,
    capture_stage_inputs,
    hollow_out_stage,
    set_entry,
    set_exit,
)
from megasched.trainer.stages.stage_transfer import BoundaryCodec, StageBuffers, receive_hidden, send_hidden
from megasched.weights.source import WeightSource

_PREFIX = "definition."


class ScheduledModel(MegatronModule):
    """Represents a definition that is lowered for this rank's stage.

    Attributes:
        definition: the HF model; modules of other stages are hollow.
        pre_process, post_process, vp_stage, pg_collection, input_tensor: as Megatron's trainer reads them.
        not_loaded: HF names of parameters that are not read from the checkpoint being loaded; they keep their
            values.
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
        stages: Sequence[Stage] = (),
        packing: BoundaryCodec | None = None,
    ) -> None:
        """Lowers a definition for a stage, and fills it from a source of weights.

        Args:
            stages: all stages, in the order in which the model runs.
            packing: codec of the stage boundaries; None where only the hidden state crosses them, as it is.
        """
        super().__init__(config)
        self._packing = packing
        self.definition = definition
        self.plan, self.stage, self.vp_stage, self.pg_collection = plan, stage, vp_stage, pg_collection
        self.pre_process, self.post_process = stage.first, stage.last
        self.input_tensor: torch.Tensor | None = None
        self._wire = StageBuffers()
        self._positions_checked = False
        cpu = config.use_cpu_initialization
        self._device = torch.device("cpu") if cpu else torch.device("cuda", torch.cuda.current_device())
        self._objective = objective_of(definition)
        self._trained = {name: parameter.requires_grad for name, parameter in definition.named_parameters()}
        self._context = CpGroup(pg_collection.cp) if plan.layout.cp > 1 else None
        persistent = persistent_buffers(definition)
        kept = kept_in_float32(definition, config.params_dtype, [*plan.placements, *persistent])
        self._float32 = kept.union(name for name, canonical in plan.canonical.items() if canonical in kept)
        renamed = self._build(schedule, source)
        self._float32 = self._float32.union(own for own, name in renamed.items() if name in kept)
        made = {name: parameter.dtype for name, parameter in definition.named_parameters()}
        self._float32 = self._float32.union(n for n in self._assemblies if made.get(n) == torch.float32)
        moved = plan.renamed
        names = {**moved, **{own: moved.get(name, name) for own, name in renamed.items()}}
        here = [moved.get(name, name) for name in persistent if self._here(name.rpartition(".")[0])]
        materialize_buffers(definition, source, here, names, self._device)
        self.not_loaded: frozenset[str] = frozenset()
        shapes = {moved.get(name, name): shape for name, shape in persistent.items()}
        self._buffers_saved = SavedBuffers(shapes, definition, names, plan, stages, stage)
        self._tie()
        self._share(stages)

    def _build(self, schedule: Schedule, source: WeightSource) -> Mapping[str, str]:
        """Lowers the definition; returns its renamed buffers: name now -> name in the definition."""
        plan, structure = self.plan, self.plan.stack
        context = BuildContext(
            plan=plan,
            group=self.pg_collection.tp,
            expert_group=self.pg_collection.ep,
            config=self.config,
            source=source,
            device=self._device,
            megatron_finalizes=True,
            context_parallel=self._context,
            float32=self._float32,
        )
        self._assemblies = context.assemblies
        hollow_out_stage(self.definition, structure, self.stage, self._wire, self.config.params_dtype)
        here = self._here
        lower(schedule, self.definition, context, here)
        apply_recompute_flags(self.definition, structure, self.stage, self.config)
        enter_fp8(self.definition, plan, self.config, here)
        if not self.stage.empty:
            set_entry(self.definition, structure, self.stage, self._wire)
            lower_sequence_boundaries(self.definition, context, here, first=self.stage.first, last=self.stage.last)
            capture_stage_inputs(self.definition, structure, self.stage, self._wire)
            set_exit(self.definition, structure, self.stage)
        self._loss = make_loss(self.definition, plan, self.pg_collection.tp, last=self.stage.last)
        if isinstance(self._loss, VocabParallelLoss) and structure.calls_loss:
            self.definition.loss_function = self._loss
        return context.renamed_buffers

    def _here(self, path: str) -> bool:
        return self.stage.holds(self.plan.stack, path)

    # embeddings -------------------------------------------------------------------------------------

    def _tie(self) -> None:
        """Marks tied and embedding weights as Megatron's LanguageModule does.

        See megatron/core/models/common/language_module/language_module.py.
        """
        canonical = self.plan.canonical
        names = [name for name in self.plan.ends if name is not None]
        tied = len(names) == 2 and canonical[names[0]] == canonical[names[1]]
        shared = tied and self._trained[canonical[names[0]]]  # of a frozen one there is no gradient to sum
        self.share_embeddings_and_output_weights = shared
        for weight in self._weights():
            if weight is not None:
                weight.is_embedding_or_output_parameter = True
        if self.share_embeddings_and_output_weights and self.config.pipeline_model_parallel_size > 1:
            weight = self.shared_embedding_or_output_weight() if self.stage.first or self.stage.last else None
            if weight is not None:
                weight.shared_embedding = True
                weight.shared = not self.stage.first

    def _share(self, stages: Sequence[Stage]) -> None:
        """Marks parameters that stages share as Megatron marks the tied embedding, so that one copy counts."""
        canonical = self.plan.canonical
        ends = {canonical[name] for name in self.plan.ends if name is not None}
        shared = shared_parameters(self.plan, stages)
        tied = ends if self.share_embeddings_and_output_weights else set()
        self._shared = {name: owner for name, owner in shared.items() if name not in tied}
        for name, parameter in self.definition.named_parameters():
            owner = self._shared.get(canonical.get(name, ""))
            if owner is not None:
                parameter.shared = stages[owner] != self.stage

    def shared_copies(self) -> dict[str, nn.Parameter | torch.Size]:
        """Maps each trained parameter that stages share to this stage's copy, or else to its local shape."""
        copies = {self.plan.canonical.get(name, ""): p for name, p in self.definition.named_parameters()}
        return {
            name: copies[name] if name in copies else torch.Size(self.plan.local_shape(self.plan.placements[name]))
            for name in self._shared
            if self._trained[name]
        }

    def _weights(self) -> list[nn.Parameter | None]:
        """Returns the weights of the embedding and of the head; None for one that is not of this stage."""
        here = zip(self.plan.ends, (self.stage.first, self.stage.last), strict=True)
        names = [name if is_here else None for name, is_here in here]
        return [None if name is None else self.definition.get_parameter(name) for name in names]

    def shared_embedding_or_output_weight(self) -> torch.Tensor | None:
        """Returns the tied weight on this stage, whose gradient Megatron sums over the embedding group."""
        embedding, head = self._weights()
        if self.stage.first:
            return embedding
        return head if self.stage.last else None

    # forward ----------------------------------------------------------------------------------------

    def set_input_tensor(self, input_tensor: Any) -> None:
        """Takes from Megatron what the previous stage sent: [s (/ tp under SP), b, h]."""
        self.input_tensor = input_tensor[0] if isinstance(input_tensor, list) else input_tensor

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        loss_mask: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **inputs: Any,
    ) -> torch.Tensor:
        """Runs one micro-batch through this stage; under context parallelism s is a rank's part of the sequence.

        Args:
            input_ids: [b, s] on the first stage.
            attention_mask: [b, s], 1 for a token and 0 for padding, on every stage, where the objective has it. A
                causal language model does not use it: one causal sequence a row.
            position_ids: not used, but checked once under context parallelism; the definition makes positions
                itself, or gets those of this rank's part or of packed sequences.
            loss_mask: in the shape of the labels; for a definition whose own code computes the loss.
            labels: [b, s] on the last stage, shifted already where they are the next tokens; [b] of images.
            packed_seq_params: where sequences that share a row begin, on every stage. Megatron hands over all rows
                as one then, [1, b * s]; positions begin anew with each sequence.
            inputs: other arguments that the objective gives the definition, by HF's names.

        Returns:
            [s (/ tp under SP), b, h] for the next stage; on the last one the loss of each label, [b, s] or [b], or
            the logits [..., v] when there are no labels.
        """
        if self.stage.empty:
            assert self.input_tensor is not None
            return self.input_tensor.clone()
        shape = None if labels is None else labels.shape
        if packed_seq_params is not None:
            size = self.plan.layout.micro_batch_size
            input_ids, labels = (as_rows(ids, packed_seq_params, size) for ids in (input_ids, labels))
        given = self._receive({"input_ids": input_ids, "attention_mask": attention_mask, **inputs})
        masks, packed = self._masks(packed_seq_params)
        given |= packed | self._labels(labels, loss_mask)
        try:
            if self._context is not None:
                given |= self._positions(given["input_ids"], position_ids)
            with fp8_pass(self.config), masks:
                output = self.definition(**given, **self._objective.constants)
        except StageEnd as end:
            packing, hidden = self._packing, end.hidden
            return send_hidden(hidden) if packing is None else packing.send(self.stage.stop, self._wire, hidden)
        finally:
            self._wire.clear()
        if labels is None:
            return self._loss.whole(output.logits)
        if isinstance(self._loss, DefinitionLoss):
            return self._loss.each(output.logits, output.loss, labels)
        loss = output.loss if "labels" in given else self._loss(output.logits, labels)
        return loss if packed_seq_params is None else loss.view(shape)

    def _labels(self, labels: torch.Tensor | None, loss_mask: torch.Tensor | None) -> dict[str, Any]:
        """Returns the forward arguments from which the definition computes its loss; empty where it does not."""
        if isinstance(self._loss, DefinitionLoss):
            return self._loss.arguments(labels, loss_mask, self._wire)
        return {"labels": labels} if self.plan.stack.calls_loss else {}

    def _receive(self, given: dict[str, torch.Tensor | None]) -> dict[str, Any]:
        """Returns the forward arguments; on later stages it first reads what the previous stage sent.

        An argument that a later stage does not get, and no layer there reads, is zeros of the batch's shape.
        """
        wire, sent = self._wire, self.input_tensor
        wire.open = True
        if self.stage.first:
            found: dict[str, Any] = {name: given[name] for name in self._objective.inputs}
            first = next(iter(found.values()))
            wire.batch, wire.length = first.shape[:2]  # of tokens; images say what follows
            wire.device = first.device
        else:
            assert sent is not None
            parts = self.pg_collection.tp.size() if self.plan.layout.sp else 1
            wire.batch, wire.length, wire.device = sent.shape[1], sent.shape[0] * parts, sent.device
            like = self._objective.trial_inputs(self.definition.config, wire.batch, wire.length)
            dummies = {name: torch.zeros_like(tensor, device=wire.device) for name, tensor in like.items()}
            found = {name: dummy if given.get(name) is None else given[name] for name, dummy in dummies.items()}
            if self._packing is None:
                wire.received = receive_hidden(sent)
            else:
                self._packing.receive(self.stage.start, wire, sent)
        read = self.plan.stack.token_ids
        if read is not None:
            found["input_ids"] = wire.values.setdefault(read, found["input_ids"])
        return found

    def _masks(self, params: PackedSeqParams | None) -> tuple[AbstractContextManager[None], dict[str, Any]]:
        """Returns the context in which masks are made, and the forward arguments that go with it."""
        rows = None if params is None else unpack_rows(params, self._wire.batch, self._wire.length)
        given = {} if rows is None else packed_arguments(self.plan, rows, self._device)
        if rows is not None and rows.several:
            return packed_masks(rows.numbers()), given
        if self._context is None:
            return nullcontext(), given
        return context_masks(self._context.zigzag, self._context.gather), given

    def _positions(self, ids: torch.Tensor, given: torch.Tensor | None) -> dict[str, torch.Tensor]:
        """Returns the positions of this rank's tokens, which the definition can't know, if it takes them."""
        sequence = self.plan.cp_facts
        assert self._context is not None
        assert sequence is not None
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

    # precision --------------------------------------------------------------------------------------

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> ScheduledModel:
        """Applies ``fn`` as ``nn.Module`` does, for Float16Module, inside ``keeping_precision``."""
        with self.keeping_precision():
            super()._apply(fn, recurse)
        return self

    def keeping_precision(self) -> AbstractContextManager[None]:
        """Returns a context in which what transformers keeps in float32 is not cast to another dtype."""
        return keeping_precision(self.definition, self._float32, buffers_following_dtype(self.definition))

    # checkpoints ------------------------------------------------------------------------------------

    def local_parameters(self) -> dict[str, tuple[nn.Parameter, ParamMapping]]:
        """Maps names in the lowered definition to (this rank's parameter, the HF tensors it is made of).

        Tied parameters stand under their first local name.
        """
        placements, canonical = self.plan.placements, self.plan.canonical
        return {
            name: (parameter, self._assemblies.get(name) or ParamMapping((placements[canonical[name]],)))
            for name, parameter in self.definition.named_parameters()
        }

    def names_with_nan(self) -> list[str]:
        """Returns the HF names of parameters and persistent buffers that have NaN on this rank."""
        held = self.local_parameters()
        parameters = with_nan({name: parameter.detach() for name, (parameter, _) in held.items()})
        names = dict.fromkeys(held[name][1].name for name in parameters)
        return [*names, *with_nan(self._buffers_saved.values())]

    def _checkpointed(self) -> dict[str, tuple[nn.Parameter, ParamMapping]]:
        held = self.local_parameters().items()
        return {name: pair for name, pair in held if pair[1].name not in self.not_loaded}

    def shard_owner(self, assembly: ParamMapping, dp_rank: int) -> ShardOwner:
        """Returns this rank's piece and replica among the ranks that share a parameter.

        Args:
            dp_rank: rank among the replicas of parameters that are not experts'.
        """
        groups, part = self.pg_collection, assembly.parts[0]
        if part.group == "ep":
            return ShardOwner(*assembly.cut(groups.ep.rank(), groups.ep.size()), (0, groups.expt_dp.rank()))
        whole = assembly.entry is not None or not part.sharded
        replica = (groups.tp.rank() if whole else 0, dp_rank)
        return ShardOwner(*assembly.cut(groups.tp.rank(), groups.tp.size()), replica)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Returns the checkpoint entries, with HF names and global shapes."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        dp_rank = metadata["dp_cp_group"].rank()
        entries: dict[str, Any] = {}
        vocabulary = self.plan.vocabulary
        for name, (parameter, assembly) in self._checkpointed().items():
            copy = getattr(parameter, "shared", False)  # of what another stage writes
            owner = self.shard_owner(assembly, dp_rank)
            entry = sharded_entry(parameter, assembly, owner, copy=copy, vocabulary=vocabulary)
            entries[prefix + _PREFIX + name] = entry
        for name, entry in self._buffers_saved.entries(self.pg_collection.tp.rank(), dp_rank).items():
            entries[prefix + _PREFIX + name] = entry
        return entries

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Copies loaded values into this rank's parameters and buffers; each must be there, in its shape.

        Raises:
            CheckpointMismatch: ends the process, whatever ``strict`` says.
        """
        own = {_PREFIX + name: (held, assembly.name) for name, (held, assembly) in self._checkpointed().items()}
        own |= {_PREFIX + name: (held, name) for name, held in self._buffers_saved.values().items()}
        copy_loaded(state_dict, own)
        return nn.modules.module._IncompatibleKeys([], [])
