"""Searches every layout that a job could have, each with its memory and time, or why it is out."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from megasched.definition.experts import expert_count, is_experts
from megasched.errors import MegaschedError
from megasched.language.parallel_dims import Fp8, ParallelDims
from megasched.planner.hardware.hardware import GIB, Hardware
from megasched.planner.measure.build_stage import Setting
from megasched.planner.measure.forked import map_forked
from megasched.planner.measure.parameter_counts import ParameterCounts
from megasched.planner.measure.probe import emulated_cuda, fake_groups
from megasched.planner.measure.stages import Measurements, PartlyRecomputed
from megasched.planner.memory import FILLED, RankMemory, rank_memory, stages_of, static_bytes
from megasched.planner.predict import reason_of, refuse_loops
from megasched.planner.step_time import StepTime, step_time
from megasched.trainer.session import Session
from megasched.trainer.stages.stage import Stage

MICRO_BATCHES = (1, 2, 4)
RECOMPUTE = (None, "full")
STATIC = "parameters, gradients and optimizer: "


@dataclass(frozen=True)
class Job:
    """Describes a training job and the hardware that it is for.

    Attributes:
        open_session: opens the model under a schedule, for a layout.
        dtype: dtype of parameters.
        gradient_dtype: dtype of the gradients that Megatron sums and sends.
        fp8: 8-bit training of the layers.
        largest_context: largest CP.
    """

    open_session: Callable[[ParallelDims], Session]
    hardware: Hardware
    gpus: int
    sequence_length: int
    global_batch_size: int
    dtype: torch.dtype = torch.bfloat16
    gradient_dtype: torch.dtype = torch.float32
    fp8: Fp8 | None = None
    largest_context: int = 8


@dataclass(frozen=True)
class Candidate:
    """Represents a layout with its recompute.

    Attributes:
        recompute_granularity: Megatron's: None or "full".
        recompute_num_layers: layers of each stage that are recomputed, its first ones; None for all.
        memory: memory of each pipeline rank; may be empty where one of them has no room.
        why_out: empty for one that can be run.
        lacking: bytes that its fullest rank needs beyond those that there are; 0 where it is not out for memory.
    """

    layout: ParallelDims
    recompute_granularity: str | None
    microbatches: int
    memory: tuple[RankMemory, ...] = ()
    time: StepTime | None = None
    why_out: str = ""
    lacking: int = 0
    recompute_num_layers: int | None = None

    @property
    def fullest(self) -> RankMemory:
        return max(self.memory, key=lambda memory: memory.total)


def search(job: Job, *, on_group: Callable[[ParallelDims], Any] = lambda layout: None) -> list[Candidate]:
    """Returns all candidates: those that fit, fastest first, then the others.

    Args:
        on_group: called with TP, CP and EP of the layouts that come next.
    """
    contexts = _powers(job.largest_context)
    found: list[Candidate] = []
    with emulated_cuda():
        if len(contexts) == 1:
            found = _of_context(job, on_group, 1)
        else:  # a process for each: layouts of one CP have much in common
            results = map_forked(partial(_of_context, job, lambda group: None), contexts)
            for cp in contexts:
                on_group(ParallelDims(context_parallel_size=cp))
                found += next(results)
    return sorted(found, key=lambda one: (bool(one.why_out), one.time.total if one.time else 0.0))


def _of_context(job: Job, on_group: Callable[[ParallelDims], Any], cp: int) -> list[Candidate]:
    try:
        groups = list(_groups(job, cp))[::-1]  # those of many ranks take longest: begin with them
    except MegaschedError as error:
        if cp == 1:
            raise
        return [Candidate(ParallelDims(context_parallel_size=cp), None, 0, why_out=reason_of(error))]
    with suppress(MegaschedError):  # it is that group's own, and comes again
        for group in groups[:1]:  # the plans and cuts of the others rest on the same runs
            job.open_session(group).forward_flops(job.sequence_length)
    results = map_forked(partial(_of_group, job), groups)
    parts: list[list[Candidate]] = []
    for group in groups:
        on_group(group)
        parts.append(next(results))
    return list(itertools.chain(*reversed(parts)))


def _groups(job: Job, cp: int) -> Iterator[ParallelDims]:
    """Yields layouts of TP inside a node and EP, which may lie over the ranks of TP and CP, in powers of two."""
    session = job.open_session(ParallelDims(context_parallel_size=cp))
    refuse_loops(session)
    largest = min(job.gpus, job.hardware.gpus_per_node)
    for tp, ep in itertools.product(_powers(largest), _powers(_experts(session))):
        if job.gpus % (tp * cp) or job.gpus % ep:
            continue
        dims = ParallelDims(
            tensor_model_parallel_size=tp,
            sequence_parallel=tp > 1,
            context_parallel_size=cp,
            expert_model_parallel_size=ep,
            fp8=job.fp8,
        )
        if job.sequence_length % dims.sequence_multiple == 0:
            yield dims


def _experts(session: Session) -> int:
    """Returns the most experts of a layer that can be sharded over EP; 1 where there are none."""
    return max((expert_count(m) for m in session.replaced.modules() if is_experts(m)), default=1)


def _powers(largest: int) -> list[int]:
    return [1 << power for power in range(largest.bit_length())]


def _of_group(job: Job, group: ParallelDims) -> list[Candidate]:
    try:
        session = job.open_session(group)
        with fake_groups(group):
            return list(_of_session(job, group, session))
    except MegaschedError as error:
        return [Candidate(group, None, 0, why_out=reason_of(error))]


def _of_session(job: Job, group: ParallelDims, session: Session) -> Iterator[Candidate]:
    measured: dict[tuple[int, str | None], Measurements] = {}
    counts = ParameterCounts(session)
    for layout in _layouts(job, group, session):
        microbatches = job.global_batch_size // (layout.data_parallel_size * layout.micro_batch_size)
        try:
            stages = stages_of(session, layout, job.sequence_length)
        except MegaschedError as error:
            yield Candidate(layout, None, microbatches, why_out=reason_of(error))
            continue
        if (size := _least_size(job, counts, stages, layout)) > job.hardware.usable_bytes:
            yield _too_large(job, size, Candidate(layout, None, microbatches), STATIC)
            continue
        for recompute in RECOMPUTE:
            key = layout.micro_batch_size, recompute
            if key not in measured:
                setting = Setting(
                    layout.micro_batch_size,
                    job.sequence_length,
                    job.dtype,
                    recompute,
                    job.gradient_dtype,
                    on_gpu=True,
                )
                measured[key] = Measurements(session, setting, like=next(iter(measured.values()), None))
            candidate = _candidate(job, measured[key], stages, layout, microbatches)
            if recompute is not None and not candidate.why_out:
                plain = measured[layout.micro_batch_size, None]
                candidate = _least_recompute(job, plain, measured[key], stages, candidate)
            yield candidate
            if not candidate.why_out:  # recompute is for what does not fit
                break


def _least_recompute(
    job: Job, plain: Measurements, full: Measurements, stages: Sequence[Stage], whole: Candidate
) -> Candidate:
    """Returns the candidate that recomputes the fewest layers of each stage and still fits.

    Args:
        whole: candidate with all layers recomputed, which fits.
    """
    found, low, high = whole, 1, max(stage.stop - stage.start for stage in stages)
    while low < high:
        count = (low + high) // 2
        partly = PartlyRecomputed(plain, full, count)
        candidate = _candidate(job, partly, stages, whole.layout, whole.microbatches)
        if candidate.why_out:
            low = count + 1
        else:
            found, high = replace(candidate, recompute_num_layers=count), count
    return found


def _least_size(job: Job, counts: ParameterCounts, stages: Sequence[Stage], layout: ParallelDims) -> int:
    """Returns the bytes of a layout's fullest rank without activations, before anything is measured."""
    ranks = (counts.held(stages[rank :: layout.pp]) for rank in range(layout.pp))
    return max(sum(static_bytes(held, layout, job.dtype, job.gradient_dtype, sharded=True)) for held in ranks)


def _too_large(job: Job, size: int, candidate: Candidate, what: str = "") -> Candidate:
    """Returns the candidate as one that is out, because its fullest rank needs so many bytes."""
    room = job.hardware.usable_bytes
    why = f"{what}{size / GIB:.2f} GiB do not fit in {room / GIB:.2f} GiB"
    return replace(candidate, why_out=why, lacking=math.ceil(size - room))


def _layouts(job: Job, group: ParallelDims, session: Session) -> Iterator[ParallelDims]:
    """Yields the layouts of a group whose PP, VPP and micro-batches divide what they must."""
    layers = session.plan.stack.count
    ranks = job.gpus // (group.tp * group.cp)
    # Megatron's own layers overlap what they send over TP with their products.
    overlaps = group.sp and session.plan.blocks.issuperset(session.plan.stack.layer_paths())
    for pp, batch in itertools.product(range(1, layers + 1), MICRO_BATCHES):
        if ranks % pp or job.gpus // pp % group.ep or job.global_batch_size % (ranks // pp * batch):
            continue
        microbatches = job.global_batch_size // (ranks // pp * batch)
        for vpp in _chunks(pp, layers, microbatches):
            yield ParallelDims(
                tensor_model_parallel_size=group.tp,
                sequence_parallel=group.sequence_parallel,
                context_parallel_size=group.cp,
                expert_model_parallel_size=group.ep,
                pipeline_model_parallel_size=pp,
                virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None,
                data_parallel_size=ranks // pp,
                micro_batch_size=batch,
                fp8=group.fp8,
                tp_comm_overlap=overlaps,
            )


def _chunks(pp: int, layers: int, microbatches: int) -> list[int]:
    """Returns the numbers of model chunks to try.

    For each number of layers they are of the stages that have no fewer, and of those that have no more (126 layers
    two by two are 63 stages; 64 have the head for a layer). Interleaving takes groups of PP.
    """
    if pp == 1 or microbatches % pp:
        return [1]
    sizes = range(1, layers // pp + 1)
    found = {1, *(layers // (pp * size) for size in sizes), *(-(-layers // (pp * size)) for size in sizes)}
    return sorted(vpp for vpp in found if pp * vpp <= layers)


def _candidate(
    job: Job,
    measured: Measurements,
    stages: Sequence[Stage],
    layout: ParallelDims,
    microbatches: int,
) -> Candidate:
    recompute = measured.setting.recompute_granularity
    filled = min(microbatches, FILLED * layout.pp)
    of_rank = partial(rank_memory, measured, stages, layout, microbatches=filled, sharded=True)
    # The second rank of three has neither end of the model, and what it takes is measured in a third of the time.
    bare = Candidate(layout, recompute, microbatches)
    if layout.pp > 2 and (size := of_rank(1).total) > job.hardware.usable_bytes:
        return _too_large(job, size, bare)
    memory = tuple(of_rank(rank) for rank in range(layout.pp))
    if (size := max(one.total for one in memory)) > job.hardware.usable_bytes:
        return _too_large(job, size, replace(bare, memory=memory))
    time = step_time(measured, stages, layout, job.hardware, microbatches=microbatches, sharded=True)
    return Candidate(layout, recompute, microbatches, memory, time)
