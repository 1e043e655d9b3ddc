"""Computes the memory of a run on each pipeline rank, from Megatron's own arguments."""

from __future__ import annotations

from argparse import Namespace

import torch

from megasched.planner.measure.build_stage import Setting
from megasched.planner.measure.probe import fake_groups
from megasched.planner.measure.stages import measurements_of
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
    partly = args.recompute_granularity == "full" and args.recompute_method == "block"
    with fake_groups(layout):
        measured = measurements_of(session, _setting(args), args.recompute_num_layers if partly else None)
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


def _setting(args: Namespace) -> Setting:
    in_float32 = args.accumulate_allreduce_grads_in_fp32 or args.params_dtype == torch.float32
    return Setting(
        micro_batch_size=args.micro_batch_size,
        sequence_length=args.seq_length,
        dtype=args.params_dtype,
        recompute_granularity=args.recompute_granularity,
        gradient_dtype=torch.float32 if in_float32 else args.params_dtype,
        on_gpu=args.params_dtype != torch.float32,
    )
