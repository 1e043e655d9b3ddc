"""Predicts how long a step takes: the work of each chunk on the hardware, played through the pipeline schedule."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import TYPE_CHECKING

from megasched.language.parallel_dims import ParallelDims
from megasched.planner.hardware.hardware import Group, Hardware
from megasched.planner.measure.parameter_counts import Count
from megasched.planner.measure.work import Work
from megasched.planner.pipeline import Chunk, simulate

if TYPE_CHECKING:
    from megasched.planner.measure.stages import Measurements
    from megasched.trainer.stages.stage import Stage

# What a distributed optimizer sends and touches for each parameter that a rank holds, in bytes: gradients
# are reduced, parameters in 16 bits gathered (megatron/core/distributed/param_and_grad_buffer.py); its
# step reads and writes both numbers of Adam and the parameter in float32, and reads the gradient.
_PARAMETER, _STEP = 2, 30
# Of what could be hidden behind a backward or forward, the first and last bucket can't be.
_EXPOSED = 0.1
_TENSOR = "TENSOR_MODEL_PARALLEL_GROUP"
_DATA, _EXPERT_DATA = "DATA_PARALLEL_GROUP_WITH_CP", "EXPERT_DATA_PARALLEL_GROUP"
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


def groups_of(layout: ParallelDims) -> dict[str, Group]:
    """Returns Megatron's groups by name.

    Its order of ranks is TP, CP, DP, PP; those of experts have a grid of their own, in which it is EP, DP, PP
    (``megatron/core/parallel_state.py``).
    """
    tp, cp, ep = layout.tp, layout.cp, layout.ep
    of_stage = tp * cp * layout.data_parallel_size
    return {
        _TENSOR: Group(tp, tp),
        "CONTEXT_PARALLEL_GROUP": Group(cp, tp * cp),
        "EXPERT_MODEL_PARALLEL_GROUP": Group(ep, ep),
        _DATA: Group(cp * layout.data_parallel_size, of_stage),
        _EXPERT_DATA: Group(layout.expert_data_parallel_size, of_stage),
    }


def pass_seconds(work: Work, layout: ParallelDims, hardware: Hardware, itemsize: int) -> tuple[float, float]:
    """Returns the seconds in which one pass of a micro-batch computes, and in which it sends without computing."""
    products = hardware.product_seconds(work)
    overlapped = _TENSOR if layout.tp_comm_overlap else ""
    alone, behind = hardware.send_seconds(work, groups_of(layout), overlapped)
    return products + hardware.other_seconds(work, itemsize), alone + max(0.0, behind - products)


def step_time(
    measured: Measurements,
    stages: Sequence[Stage],
    layout: ParallelDims,
    hardware: Hardware,
    *,
    microbatches: int,
) -> StepTime:
    """Returns the step time of a layout with these stages, in the order in which the model runs."""
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
    groups, itemsize = groups_of(layout), setting.gradient_dtype.itemsize
    gradients = max(_gradients(chunks[busiest], hardware, count, groups, itemsize) for count in counts)
    own = max(count.dense / groups[_DATA].ranks + count.experts / groups[_EXPERT_DATA].ranks for count in counts)
    return StepTime(compute, sending, waiting, gradients, hardware.traffic_seconds(own * _STEP), chunks)


def _played(chunks: Sequence[Sequence[Chunk]], microbatches: int) -> float:
    """Returns the seconds of the pipeline schedule; from some point on each micro-batch takes the same time."""
    few, many = (count * len(chunks) for count in _PLAYED)
    if microbatches <= many:
        return max(span.end for span in simulate(chunks, microbatches))
    short, long = (max(span.end for span in simulate(chunks, count)) for count in (few, many))
    return long + (long - short) / (many - few) * (microbatches - many)


def _gradients(
    chunks: Sequence[Chunk], hardware: Hardware, count: Count, groups: Mapping[str, Group], itemsize: int
) -> float:
    """Returns the seconds of Megatron's overlapped gradient reduction and parameter gathering that are not hidden.

    Args:
        count: count of a rank's parameters.
        groups: the groups of ranks by name.
        itemsize: bytes of a gradient.
    """
    backward, forward = sum(chunk.backward for chunk in chunks), sum(chunk.forward for chunk in chunks)
    total = 0.0
    for size, behind in ((itemsize, backward), (_PARAMETER, forward)):
        seconds = sum(
            _shared_seconds(hardware, groups[name], numbers * size)
            for name, numbers in ((_DATA, count.dense), (_EXPERT_DATA, count.experts))
        )
        total += max(seconds - behind, _EXPOSED * seconds)
    return total


def _shared_seconds(hardware: Hardware, group: Group, size: int) -> float:
    """Returns the seconds to reduce or gather so many bytes, of which each rank has a part after or before."""
    if group.ranks == 1 or not size:
        return 0.0
    return hardware.link(group.span).seconds(size * (group.ranks - 1) / group.ranks)
