"""Predicts one step of one layout: what each rank holds and sends, and on named hardware how long it takes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add

import torch

from megasched.errors import ConfigError, MegaschedError, Problem, ScheduleError
from megasched.planner.hardware.hardware import Hardware
from megasched.planner.measure.build_stage import Setting
from megasched.planner.measure.probe import fake_groups
from megasched.planner.measure.stages import measurements_of
from megasched.planner.measure.work import Sent, Work
from megasched.planner.memory import FILLED, RankMemory, chunk_memory, rank_memory, stages_of
from megasched.planner.step_time import StepTime, chunk_work, step_time
from megasched.trainer.session import Session


@dataclass(frozen=True)
class StepFlags:
    """Holds the flags of a run that decide, beside its layout, what a step costs.

    Attributes:
        recompute_granularity: Megatron's: None, "selective" or "full".
        recompute_num_layers: layers of each stage that are recomputed, its first ones; None for all.
        use_distributed_optimizer: shard the optimizer's state over the ranks with the same parameters.
        grad_reduce_in_bf16: sum and send gradients in bf16.
    """

    recompute_granularity: str | None = None
    recompute_num_layers: int | None = None
    use_distributed_optimizer: bool = False
    grad_reduce_in_bf16: bool = False

    @property
    def gradient_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.grad_reduce_in_bf16 else torch.float32


@dataclass(frozen=True)
class Prediction:
    """Holds a predicted step in bf16.

    Attributes:
        memory: memory of each pipeline rank.
        kept: for each stage, bytes of the activations that one micro-batch keeps for its backward.
        sent: for the forward and the backward of one micro-batch through all stages, collective operations of one
            rank of each stage -> how many there are.
        time: seconds of the step; None without hardware.
    """

    memory: tuple[RankMemory, ...]
    kept: tuple[int, ...]
    sent: tuple[Counter[Sent], Counter[Sent]]
    time: StepTime | None

    @property
    def fullest(self) -> RankMemory:
        return max(self.memory, key=lambda memory: memory.total)


def predict(
    session: Session, flags: StepFlags, hardware: Hardware | None, *, sequence_length: int, microbatches: int
) -> Prediction:
    """Predicts a step of the session's layout; the process must have no process groups.

    Args:
        microbatches: micro-batches of the step.

    Raises:
        ConfigError, ScheduleError: the model can't be measured without values, or has layers that run in loops.
    """
    refuse_loops(session)
    layout = session.plan.layout
    stages = stages_of(session, layout, sequence_length)
    setting = Setting(
        layout.micro_batch_size,
        sequence_length,
        recompute_granularity=flags.recompute_granularity,
        gradient_dtype=flags.gradient_dtype,
        on_gpu=True,
    )
    sharded = flags.use_distributed_optimizer
    with fake_groups(layout):
        measured = measurements_of(session, setting, flags.recompute_num_layers)
        filled = min(microbatches, FILLED * layout.pp)
        memory = tuple(
            rank_memory(measured, stages, layout, rank, microbatches=filled, sharded=sharded)
            for rank in range(layout.pp)
        )
        kept = tuple(measured.once(chunk_memory, stage).kept for stage in stages)
        works = [measured.once(chunk_work, stage) for stage in stages]
        time = None
        if hardware is not None:
            time = step_time(measured, stages, layout, hardware, microbatches=microbatches, sharded=sharded)
    sent = _sent([forward for forward, _ in works]), _sent([backward for _, backward in works])
    return Prediction(memory, kept, sent, time)


def _sent(works: Sequence[Work]) -> Counter[Sent]:
    return reduce(add, (work.sent for work in works))


def reason_of(error: MegaschedError) -> str:
    """Returns the message of an error in one line."""
    if isinstance(error, ScheduleError):
        return "; ".join(dict.fromkeys(problem.what for problem in error.problems))
    return str(error).partition("\n")[0]


def refuse_loops(session: Session) -> None:
    """Refuses layers that are called more than once in a forward.

    Raises:
        ScheduleError: there are some.
    """
    structure = session.plan.structure
    if structure is not None and structure.repeated:
        what = "no plan: layers that are called more than once are measured once"
        raise ScheduleError(Problem(what, structure.layers, remedy="run it, and `megasched tune` it"))


def refuse_8_bits(hardware: Hardware, recipe: str | None) -> None:
    """Refuses 8-bit training on a GPU without such matrix products.

    Raises:
        ConfigError: for ``--fp8-recipe``.
    """
    if recipe is not None and hardware.fp8_tflops is None:
        raise ConfigError(f"--fp8-recipe {recipe}: {hardware.name} has no 8-bit matrix products (fp8_tflops)")
