"""Defines one point in (TP, SP, PP, VPP, CP, EP, DP), given by Megatron's own flags."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from megasched.errors import ConfigError

Group = Literal["tp", "ep"]  # of ranks that share parameters

FP8_RECIPES = ("delayed", "tensorwise", "blockwise", "mxfp8")


@dataclass(frozen=True, kw_only=True)
class Fp8:
    """Describes 8-bit training of the layers by Transformer Engine; field names are Megatron's.

    Attributes:
        fp8_recipe: how tensors are scaled: delayed, tensorwise, blockwise or mxfp8.
        num_layers_at_start_in_bf16, num_layers_at_end_in_bf16: layers that stay in 16 bits.
    """

    fp8_recipe: str = "delayed"
    num_layers_at_start_in_bf16: int = 0
    num_layers_at_end_in_bf16: int = 0

    def __post_init__(self) -> None:
        if self.fp8_recipe not in FP8_RECIPES:
            raise ConfigError(f"fp8_recipe is {self.fp8_recipe!r}; it must be one of {', '.join(FP8_RECIPES)}")

    @property
    def multiple(self) -> int:
        """Returns the number that every size in an 8-bit matrix product must be a multiple of.

        See ``get_fp8_align_size`` in megatron/core/fp8_utils.py.
        """
        return 32 if self.fp8_recipe == "mxfp8" else 16

    def covers(self, layer: int, count: int) -> bool:
        """Returns whether layer ``layer`` of ``count`` runs in 8 bits (``is_first_last_bf16_layer`` there)."""
        return self.num_layers_at_start_in_bf16 <= layer < count - self.num_layers_at_end_in_bf16


@dataclass(frozen=True, kw_only=True)
class ParallelDims:
    """Describes how a job is spread over ranks; field names are Megatron's flag names.

    Attributes:
        tensor_model_parallel_size: TP, ranks that shard one layer.
        sequence_parallel: SP, activations between TP regions are split along the sequence.
        pipeline_model_parallel_size: PP, ranks that share the depth of the model.
        virtual_pipeline_model_parallel_size: VPP, model chunks per pipeline rank; None without interleaving.
        context_parallel_size: CP, ranks that share one sequence.
        expert_model_parallel_size: EP, ranks that share the experts of one layer.
        data_parallel_size: DP, replicas of the whole model.
        micro_batch_size: sequences in one forward.
        fp8: 8-bit training, or None; a schedule may depend on it.
        tp_comm_overlap: communication over TP overlaps with matrix products, as Megatron's own layers do.
        mixture_flags: given flags of Megatron that only its own mixtures of experts support.
        packed_sequences: a row of a batch may hold several sequences (``--sft``).
        parallel_output: the library's models return logits cut over the vocabulary, as with Megatron's argument of
            its ``GPTModel``; the trainer takes them so in any case.
    """

    tensor_model_parallel_size: int = 1
    sequence_parallel: bool = False
    pipeline_model_parallel_size: int = 1
    virtual_pipeline_model_parallel_size: int | None = None
    context_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    data_parallel_size: int = 1
    micro_batch_size: int = 1
    fp8: Fp8 | None = None
    tp_comm_overlap: bool = False
    mixture_flags: tuple[str, ...] = ()
    packed_sequences: bool = False
    parallel_output: bool = False

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name.endswith("_size") and value is not None and value < 1:
                raise ConfigError(f"{name} is {value}; it must be at least 1")
        if self.virtual_pipeline_model_parallel_size is not None and self.pipeline_model_parallel_size == 1:
            raise ConfigError("virtual pipeline chunks (VPP) need pipeline_model_parallel_size of at least 2")

    @property
    def tp(self) -> int:
        return self.tensor_model_parallel_size

    @property
    def pp(self) -> int:
        return self.pipeline_model_parallel_size

    @property
    def cp(self) -> int:
        return self.context_parallel_size

    @property
    def ep(self) -> int:
        return self.expert_model_parallel_size

    @property
    def vpp(self) -> int:
        """Returns the number of model chunks per pipeline rank (1 without interleaving)."""
        return self.virtual_pipeline_model_parallel_size or 1

    @property
    def sp(self) -> bool:
        """Returns whether sequence parallelism has an effect; Megatron ignores it at TP 1."""
        return self.sequence_parallel and self.tp > 1

    @property
    def world_size(self) -> int:
        """Returns the number of ranks of the whole job; the ranks of EP are among them."""
        return self.tp * self.pp * self.cp * self.data_parallel_size

    @property
    def expert_data_parallel_size(self) -> int:
        """Returns the number of ranks that hold the same experts.

        Experts have their own grid of ranks, in which no feature is sharded: EP divides all ranks of a pipeline
        stage, those of TP and CP included.
        """
        return self.tp * self.cp * self.data_parallel_size // self.ep

    @property
    def sequence_multiple(self) -> int:
        """Returns what divides a sequence: CP gives each rank two pieces, and SP cuts what a rank has."""
        return math.lcm(self.tp * self.cp if self.sp else 1, 2 * self.cp if self.cp > 1 else 1)

    def flags(self) -> list[str]:
        """Returns Megatron's flags for these sizes; there is none for DP, which the number of ranks implies."""
        found = []
        for name in ("tensor_model", "pipeline_model", "context", "expert_model"):
            size = getattr(self, f"{name}_parallel_size")
            if size > 1:
                found += [f"--{name.replace('_', '-')}-parallel-size", str(size)]
        if self.vpp > 1:
            found += ["--num-virtual-stages-per-pipeline-rank", str(self.vpp)]
        return [*found, "--sequence-parallel"] if self.sequence_parallel else found

    def size_of(self, group: Group) -> int:
        """Returns the number of ranks in one group of this kind."""
        return self.ep if group == "ep" else self.tp

    def __str__(self) -> str:
        parts = [f"TP{self.tp}"] if self.tp > 1 else []
        parts += ["SP"] if self.sp else []
        parts += [f"PP{self.pp}"] if self.pp > 1 else []
        parts += [f"VPP{self.vpp}"] if self.vpp > 1 else []
        parts += [f"CP{self.cp}"] if self.cp > 1 else []
        parts += [f"EP{self.ep}"] if self.ep > 1 else []
        parts += [f"DP{self.data_parallel_size}"] if self.data_parallel_size > 1 else []
        text = " x ".join(parts) or "one rank"
        return text if self.fp8 is None else f"{text}, 8 bits ({self.fp8.fp8_recipe})"


Layout = ParallelDims  # its first name, by which scripts that are already written know it


def current_layout() -> ParallelDims:
    """Returns the layout of Megatron's process groups in this process; one rank if they are not initialised."""
    import sys

    state = sys.modules.get("megatron.core.parallel_state")
    if state is None or not state.model_parallel_is_initialized():
        return ParallelDims()
    return ParallelDims(
        tensor_model_parallel_size=state.get_tensor_model_parallel_world_size(),
        pipeline_model_parallel_size=state.get_pipeline_model_parallel_world_size(),
        virtual_pipeline_model_parallel_size=state.get_virtual_pipeline_model_parallel_world_size(),
        context_parallel_size=state.get_context_parallel_world_size(),
        expert_model_parallel_size=state.get_expert_model_parallel_world_size(),
        data_parallel_size=state.get_data_parallel_world_size(),
    )
