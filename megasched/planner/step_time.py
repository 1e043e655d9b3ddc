"""Predicts how long a step takes: the work of each chunk on the hardware, played through the pipeline schedule."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import TYPE_CHECKING

import torch

from megasched.language.parallel_dims import ParallelDims
from megasched.planner.groups import DATA, EXPERT_DATA, TENSOR, groups_of
from megasched.planner.hardware.hardware import Hardware
from megasched.planner.measure.parameter_counts import Count
from megasched.planner.measure.work import Work
from megasched.planner.pipeline import Chunk, simulate
from megasched.planner.replicas import gradient_transfers, parameter_transfers

if TYPE_CHECKING:
    from megasched.planner.measure.stages import Measurements
    from megasched.trainer.stages.stage import Stage

# What a step of Adam touches for each parameter, in bytes: it reads and writes both of its numbers and the
# parameter in float32, writes that in 16 bits, and reads the gradient.
_STEP = 30
# Of what could be hidden behind a backward or forward, the first and last bucket can't be.
_EXPOSED = 0.1
# A schedule is played through with so many micro-batches for each pipeline rank; each more takes the same time.
_PLAYED = 2, 4


@dataclass(frozen=True)
class StepTime:
    """Holds the seconds of one step.

    Attributes:
        compute: computing of the busiest pipeline rank, over all micro-batches.
        sending: collective operations of TP, CP and EP on that rank.
        waiting: waiting of that rank for other stages: the pipeline's bubble, and sends between stages.
        gradients: reduction of gradients and gathering of parameters over DP, as far as it is not hidden.
        optimizer: step of the optimizer.
        chunks: [PP][VPP], seconds of one micro-batch in each model chunk.
    """

    compute: float
    sending: float
    waiting: float
    gradients: float
    optimizer: float
    chunks: Sequence[Sequence[Chunk]] = ()

    @property
    def parts(self) -> dict[str, float]:
        """Returns the parts of the step by name; they add up to it."""
        return {name: getattr(self, name) for name in ("compute", "sending", "waiting", "gradients", "optimizer")}

    @property
    def total(self) -> float:
        return sum(self.parts.values())


def chunk_work(measured: Measurements, stage: Stage) -> tuple[Work, Work]:
    """Returns the work of the forward and of the backward of one micro-batch in a stage."""
    layers = measured.layers_of(stage)
    end, at = measured.end(stage)
    others = layers[:-1] if at else layers[1:]
    forward = reduce(add, (one.forward_work for one in others), end.before_work + end.forward_work)
    return forward, reduce(add, (one.backward_work for one in others), end.backward_work)


def pass_seconds(work: Work, layout: ParallelDims, hardware: Hardware, itemsize: int) -> tuple[float, float]:
    """Returns the seconds in which one pass of a micro-batch computes, and in which it sends without computing."""
    products = hardware.product_seconds(work)
    overlapped = TENSOR if layout.tp_comm_overlap else ""
    alone, behind = hardware.send_seconds(work, groups_of(layout), overlapped)
    return products + hardware.other_seconds(work, itemsize), alone + max(0.0, behind - products)


def step_time(
    measured: Measurements,
    stages: Sequence[Stage],
    layout: ParallelDims,
    hardware: Hardware,
    *,
    microbatches: int,
    sharded: bool,
) -> StepTime:
    """Returns the step time of a layout with these stages, in the order in which the model runs.

    Args:
        sharded: whether the optimizer's state is sharded (Megatron's distributed optimizer).
    """
    setting, data_parallel = measured.setting, layout.data_parallel_size
    wire = measured.layer(0).output
    behind = layout.tp * layout.cp * data_parallel  # ranks from one stage to the next
    send = hardware.link(behind + 1).seconds(wire) if layout.pp > 1 else 0.0
    chunks: list[list[Chunk]] = [[] for _ in range(layout.pp)]
    seconds = [[0.0, 0.0] for _ in range(layout.pp)]
    passes: dict[Hashable, list[tuple[float, float]]] = {}
    for number, stage in enumerate(stages):
        look = measured.look(stage)
        if look not in passes:
            works = measured.once(chunk_work, stage)
            passes[look] = [pass_seconds(work, layout, hardware, setting.dtype.itemsize) for work in works]
        forward, backward = passes[look]
        for index in range(2):
            seconds[number % layout.pp][index] += forward[index] + backward[index]
        chunks[number % layout.pp].append(Chunk(sum(forward), sum(backward), send))
    busiest = max(range(layout.pp), key=lambda rank: sum(seconds[rank]))
    compute, sending = (part * microbatches for part in seconds[busiest])
    waiting = max(0.0, _played(chunks, microbatches) - compute - sending)
    counts = [measured.parameters.held(stages[rank :: layout.pp]) for rank in range(layout.pp)]
    dtypes, groups = (setting.dtype, setting.gradient_dtype), groups_of(layout)
    gradients = max(
        _exposed_seconds(chunks[busiest], hardware, count, layout, dtypes, sharded=sharded) for count in counts
    )
    replicas = [groups[name].ranks if sharded else 1 for name in (DATA, EXPERT_DATA)]
    own = max(count.dense / replicas[0] + count.experts / replicas[1] for count in counts)
    return StepTime(compute, sending, waiting, gradients, hardware.traffic_seconds(own * _STEP), chunks)


def _played(chunks: Sequence[Sequence[Chunk]], microbatches: int) -> float:
    """Returns the seconds of the pipeline schedule; from some point on each micro-batch takes the same time."""
    few, many = (count * len(chunks) for count in _PLAYED)
    if microbatches <= many:
        return max(span.end for span in simulate(chunks, microbatches))
    short, long = (max(span.end for span in simulate(chunks, count)) for count in (few, many))
    return long + (long - short) / (many - few) * (microbatches - many)


def _exposed_seconds(
    chunks: Sequence[Chunk],
    hardware: Hardware,
    count: Count,
    layout: ParallelDims,
    dtypes: tuple[torch.dtype, torch.dtype],
    *,
    sharded: bool,
) -> float:
    """Returns the seconds of Megatron's overlapped gradient reduction and parameter gathering that are not hidden.

    Args:
        count: count of a rank's parameters.
        dtypes: dtypes of parameters and of gradients.
    """
    groups, total = groups_of(layout), 0.0
    for transfers, behind in (
        (gradient_transfers(count, layout, dtypes[1], sharded=sharded), sum(chunk.backward for chunk in chunks)),
        (parameter_transfers(count, layout, dtypes[0], sharded=sharded), sum(chunk.forward for chunk in chunks)),
    ):
        seconds = sum(
            hardware.collective_seconds(one.operation, one.bytes, groups[one.group]) for one in transfers
        )
        total += max(seconds - behind, _EXPOSED * seconds)
    return total
