"""Holds the surroundings of lowering one module: the TP group, Megatron's config, the source of values."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from megasched.definition.build import init_empty_weights
from megasched.layers.regions import sum_gradient
from megasched.layers.tokens import Tokens
from megasched.plan.param_mapping import ParamMapping
from megasched.plan.placement import Placement
from megasched.plan.plan import Plan

if TYPE_CHECKING:
    from megatron.core import ModelParallelConfig

    from megasched.layers.context_parallel import CpGroup
    from megasched.weights.source import WeightSource


@dataclass
class BuildContext:
    """Holds the surroundings of one build.

    Attributes:
        plan: the plan to build.
        group: Megatron's TP group.
        config: Megatron's config; linears and embeddings get copies of it.
        source: source of values; None takes those that the model holds.
        device: device of the parameters.
        expert_group: Megatron's EP group; None if experts are not distributed.
        megatron_finalizes: Megatron's trainer keeps the parameters that are made here, and will run its
            ``finalize_model_grads``, which sums the gradients of parameters marked ``sequence_parallel`` over TP.
            Otherwise ``sum_partial_gradients`` does what is to be done for partial gradients.
        context_parallel: the ranks that share a sequence; None without context parallelism.
        process_groups: Megatron's groups for its own modules; None: those of this process.
        float32: names of parameters and buffers that stay in float32 whatever the run's precision
            (``megasched.definition.build.kept_in_float32``).
        assemblies: name in the lowered model -> HF tensors, for parameters of blocks.
        renamed_buffers: name in the lowered model -> name in the definition, for buffers of blocks.
        made: canonical name -> parameter on this rank, so that ties stay ties.
        tokens: converts the shapes of inputs of linears where activations are split along the sequence.
    """

    plan: Plan
    group: torch.distributed.ProcessGroup
    config: ModelParallelConfig
    source: WeightSource | None
    device: torch.device
    megatron_finalizes: bool
    assemblies: dict[str, ParamMapping] = field(default_factory=dict)
    renamed_buffers: dict[str, str] = field(default_factory=dict)
    made: dict[str, nn.Parameter] = field(default_factory=dict)
    expert_group: Any = None
    context_parallel: CpGroup | None = None
    float32: frozenset[str] = frozenset()
    tokens: Tokens = field(default_factory=Tokens)
    process_groups: Any = None

    @property
    def groups(self) -> Any:
        """Returns a ``ProcessGroupCollection`` for Megatron's own modules."""
        from megatron.core.process_groups_config import ProcessGroupCollection

        return self.process_groups or ProcessGroupCollection.use_mpu_process_groups()

    @property
    def rank(self) -> int:
        return self.group.rank()

    @property
    def size(self) -> int:
        return self.group.size()

    def rank_and_size(self, placement: Placement) -> tuple[int, int]:
        """Returns (rank, size) in the group that a parameter is sharded over."""
        group = self.expert_group if placement.group == "ep" else self.group
        return group.rank(), group.size()

    def placement_of(self, name: str) -> Placement | None:
        """Returns the placement of a parameter of the lowered model, or the first of several HF tensors in it."""
        if name in self.assemblies:
            return self.assemblies[name].parts[0]
        canonical = self.plan.canonical.get(name)
        return None if canonical is None else self.plan.placements[canonical]

    def dtype(self, placement: Placement, held: torch.Tensor) -> torch.dtype:
        """Returns the dtype of the parameter that replaces ``held``."""
        if self.source is None:
            return held.dtype
        return torch.float32 if placement.name in self.float32 else self.config.params_dtype

    def config_with(self, **changes: Any) -> ModelParallelConfig:
        """Returns a copy of Megatron's config for one layer, with these changes and without initialisation."""
        found = copy.copy(self.config)
        found.perform_initialization = False
        found.use_cpu_initialization = self.device.type == "cpu"
        for name, value in changes.items():
            setattr(found, name, value)
        return found

    def making(self, held: torch.Tensor) -> AbstractContextManager[None]:
        """Returns the context for making a layer; parameters without values to fill in stay on meta."""
        deferred = self.source is None and held.device.type == "meta"
        return init_empty_weights() if deferred else nullcontext()

    def fill_mapped(self, parameter: nn.Parameter, assembly: ParamMapping, held: Sequence[nn.Parameter]) -> None:
        """Fills a parameter that is made of several HF tensors, like ``fill``."""
        parameter.requires_grad_(held[0].requires_grad)
        self._fill_values(parameter, assembly, held)
        reduce_partial_gradient(parameter, assembly.parts[0], self)

    def _local(self, placement: Placement, held: torch.Tensor, rank: int, size: int) -> torch.Tensor | None:
        """Returns this rank's piece of an HF tensor, or None while there is no source of values."""
        if self.source is not None:
            return self.source.local(placement, rank, size)
        if held.device.type != "meta":
            return placement.shard(held, rank, size)
        return None  # deferred by init_empty_weights

    def _fill_values(self, parameter: nn.Parameter, assembly: ParamMapping, held: Sequence[torch.Tensor]) -> None:
        """Gives a parameter of this rank its values, from the source or from the tensors that the model held."""
        device, dtype = parameter.device, parameter.dtype
        if self.source is not None:
            parameter.data = torch.empty(0, dtype=dtype, device=device)  # a large one is not held twice
        cut = assembly.cut(*self.rank_and_size(assembly.parts[0]))
        pieces = [self._local(part, tensor, *cut) for part, tensor in zip(assembly.parts, held, strict=True)]
        found = [piece for piece in pieces if piece is not None]
        if len(found) == len(pieces):
            with torch.no_grad():
                values = assembly.join(found, cut[1])
                if self.source is None:
                    parameter.copy_(values)
                else:
                    parameter.data = values.to(device=device, dtype=dtype).contiguous()

    def fill_or_tie(self, owner: nn.Module, name: str, placement: Placement, held: nn.Parameter) -> None:
        """Fills a parameter of a new layer, or replaces it by the one that it is tied to."""
        tied = self.made.get(placement.name)
        if tied is not None:
            setattr(owner, name, tied)
        else:
            self.fill(getattr(owner, name), placement, held)

    def fill(self, parameter: nn.Parameter, placement: Placement, held: nn.Parameter) -> None:
        """Sets values, ``requires_grad``, annotations and gradient reduction of a new parameter."""
        own = dict(parameter.__dict__)
        parameter.__dict__.update(held.__dict__)
        parameter.__dict__.update(own)
        parameter.requires_grad_(held.requires_grad)
        self._fill_values(parameter, ParamMapping((placement,)), [held.detach()])
        self.made[placement.name] = parameter
        reduce_partial_gradient(parameter, placement, self)


def reduce_partial_gradient(parameter: nn.Parameter, placement: Placement, context: BuildContext) -> None:
    """Makes the gradient of a replicated parameter be summed over TP if each rank computes a part of it."""
    if placement.tp_gradient == "complete" or context.size == 1 or not parameter.requires_grad:
        if hasattr(parameter, "sequence_parallel"):
            parameter.sequence_parallel = False
        return
    parameter.sequence_parallel = context.megatron_finalizes and context.plan.layout.sp
    if context.megatron_finalizes and not context.plan.layout.sp:
        sum_gradient(parameter, context.group)
