"""Computes the memory of a run on each pipeline rank, from Megatron's own arguments."""

from __future__ import annotations

from argparse import Namespace

import torch

from megasched.language.parallel_dims import ParallelDims
from megasched.planner.measure.build_stage import Setting
from megasched.planner.measure.probe import fake_groups
from megasched.planner.measure.stages import Measurements, PartlyRecomputed
from megasched.planner.memory import FILLED, RankMemory, rank_memory
from megasched.trainer.session import Session
from megasched.trainer.stages.stage import Stage


def run_memory(
    args: Namespace, session: Session, stages: list[Stage], *, microbatches: int
) -> tuple[RankMemory, ...]:
    """Returns the memory of each pipeline rank of a run; the process must have no process groups.

    Args:
        args: Megatron's arguments, validated.
        session: session of the run.
        stages: all of them, in the order in which the model runs.
        microbatches: micro-batches of one step.

    Raises:
        ConfigError: the model computes by values, and can't be measured without them.
    """
    layout = session.plan.layout
    full = args.recompute_granularity == "full"
    partly = full and args.recompute_method == "block"
    with fake_groups(layout):
        measured = Measurements(session, _setting(args, layout, args.recompute_granularity))
        if partly:
            plain = Measurements(session, _setting(args, layout, None), measured)
            measured = PartlyRecomputed(plain, measured, args.recompute_num_layers)
        return tuple(
            rank_memory(
                measured,
                stages,
                layout,
                rank,
                microbatches=min(microbatches, FILLED * layout.pp),
                sharded=args.use_distributed_optimizer,
            )
            for rank in range(layout.pp)
        )


def _setting(args: Namespace, layout: ParallelDims, recompute: str | None) -> Setting:
    in_float32 = args.accumulate_allreduce_grads_in_fp32 or args.params_dtype == torch.float32
    return Setting(
        micro_batch_size=args.micro_batch_size,
        sequence_length=args.seq_length,
        dtype=args.params_dtype,
        recompute_granularity=recompute,
        gradient_dtype=torch.float32 if in_float32 else args.params_dtype,
        on_gpu=args.params_dtype != torch.float32,
    )
