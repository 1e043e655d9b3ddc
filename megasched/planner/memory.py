"""Predicts the memory of each pipeline rank, from its modules' measured memory and the pipeline schedule."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch

from megasched.language.parallel_dims import ParallelDims
from megasched.planner.measure.parameter_counts import Count
from megasched.planner.measure.stages import Measurements
from megasched.planner.pipeline import order_of
from megasched.trainer.session import Session
from megasched.trainer.stages.refused_stages import refuse_stages
from megasched.trainer.stages.stage import Stage

# The most that a pipeline holds in flight it holds after so many micro-batches for each of its ranks.
FILLED = 3
# So far may a prediction be off: torch's CUDA allocator gives each part of a run within this (docs/plan.md).
ERROR = 0.05


@dataclass(frozen=True)
class ChunkMemory:
    """Holds the bytes of one micro-batch in a model chunk.

    Attributes:
        kept: what stays alive from its forward to its backward.
        forward: the most that is alive during the forward.
        backward: the most that is alive during the backward.
    """

    kept: int
    forward: int
    backward: int


@dataclass(frozen=True)
class RankMemory:
    """Holds the bytes on one pipeline rank at its fullest moment.

    Attributes:
        gradients: Megatron's gradient buffer.
        optimizer: this rank's part of Adam's state and of the parameters in float32.
        held: buffers, tables, communication buffers, and what was received last.
        activations: kept for backward passes, and what is alive for a moment beside it.
    """

    parameters: int
    gradients: int
    optimizer: int
    held: int
    activations: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.held + self.activations


def chunk_memory(measured: Measurements, stage: Stage) -> ChunkMemory:
    """Returns a stage's memory, from one layer measured with the stage's ends and the others measured alone."""
    if stage.start == stage.stop:
        raise ValueError("a stage without layers has nothing to measure by")
    layers = measured.layers_of(stage)
    end, at = measured.end(stage)
    others = layers[:-1] if at else layers[1:]
    everything = end.before + end.layer + sum(layer.layer for layer in others)
    kept = everything - (0 if stage.last else layers[-1].output)
    alive = end.before
    forward = end.forward + (everything - end.before - end.layer if stage.last else 0)
    backward = kept + end.backward if stage.last else 0
    for layer in layers:
        forward = max(forward, alive - layer.before + layer.forward)
        alive += layer.layer
        backward = max(backward, alive - (0 if stage.last else layer.output) + layer.backward)
    return ChunkMemory(kept, forward, max(backward, end.ending))


def activation_peak(
    chunks: Sequence[ChunkMemory], rank: int, pp: int, microbatches: int, group: int | None = None
) -> int:
    """Returns the most bytes of activations that a pipeline rank holds at once during one step."""
    peak = kept = 0
    for work in order_of(rank, pp, len(chunks), microbatches, group):
        chunk = chunks[work.chunk]
        if not work.forward:
            kept -= chunk.kept
        peak = max(peak, kept + (chunk.forward if work.forward else chunk.backward))
        if work.forward:
            kept += chunk.kept
    return peak


def static_bytes(
    count: Count, layout: ParallelDims, dtype: torch.dtype, gradient_dtype: torch.dtype, *, sharded: bool
) -> tuple[int, int, int]:
    """Returns the bytes of a rank's parameters, gradients and optimizer state.

    Adam keeps two float32 numbers for each parameter, and the parameter itself in float32 where it is trained in
    16 bits (``megatron/core/optimizer/optimizer.py``). For 8-bit products Transformer Engine keeps two copies of a
    weight, by rows and by columns.

    Args:
        count: count of the numbers in the rank's parameters.
        gradient_dtype: dtype of Megatron's gradient buffer.
        sharded: whether the optimizer's state is sharded over the ranks that have the same parameters (Megatron's
            distributed optimizer).
    """
    replicas = layout.cp * layout.data_parallel_size if sharded else 1
    of_experts = layout.expert_data_parallel_size if sharded else 1
    own = math.ceil(count.dense / replicas) + math.ceil(count.experts / of_experts)
    of_optimizer = 12 if dtype.itemsize == 2 else 8
    parameters = (count.trained + count.frozen) * dtype.itemsize + 2 * count.quantized
    return parameters, count.trained * gradient_dtype.itemsize, own * of_optimizer


def rank_memory(
    measured: Measurements,
    stages: Sequence[Stage],
    layout: ParallelDims,
    rank: int,
    *,
    microbatches: int,
    sharded: bool,
    group: int | None = None,
) -> RankMemory:
    """Returns the memory of a pipeline rank; is called inside ``fake_groups``.

    Args:
        stages: all of them, in the order in which the model runs.
        layout: its PP and VPP count, which the session's layout may lack.
        microbatches: micro-batches of one step.
        sharded: as for ``static_bytes``.
        group: as for ``order_of``.
    """
    own = list(stages)[rank :: layout.pp]
    count = measured.parameters.held(own)
    dtypes = measured.setting.dtype, measured.setting.gradient_dtype
    parameters, gradients, optimizer = static_bytes(count, layout, *dtypes, sharded=sharded)
    chunks = [measured.once(chunk_memory, stage) for stage in own]
    # Each chunk holds what it received last until the next comes, and the gradient of that.
    received = 2 * measured.layer(0).output * sum(not stage.first for stage in own)
    held = measured.held + received
    peak = activation_peak(chunks, rank, layout.pp, microbatches, group)
    return RankMemory(parameters, gradients, optimizer, held, peak)


def stages_of(session: Session, layout: ParallelDims, sequence_length: int) -> list[Stage]:
    """Returns all stages in the order in which the model runs, cut as in a run without flags of its own.

    Raises:
        ScheduleError: more stages than layers, cuts that do not fit, or a model that can't be cut.
    """
    structure = session.plan.stack
    if layout.pp > 1:
        refuse_stages(session.plan, session.definition.config)
    counts = session.stage_layers(sequence_length, layout) or [structure.count]
    bounds = pairwise([0, *accumulate(counts)])
    return [Stage(*pair, number == 0, number == len(counts) - 1) for number, pair in enumerate(bounds)]
