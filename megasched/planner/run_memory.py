"""Computes the memory of a run on each pipeline rank, from Megatron's own arguments."""

from __future__ import annotations

from argparse import Namespace

import torch

from megasched.errors import ConfigError
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
        ConfigError: the model computes by values, and can't be measured without them; or the optimizer's state is
            not that of Adam in float32, shared by all ranks with the same parameters.
    """
    layout = session.plan.layout
    group = (layout.vpp > 1 and args.microbatch_group_size_per_vp_stage) or layout.pp
    _refuse_states(args)
    partly = args.recompute_granularity == "full" and args.recompute_method == "block"
    with fake_groups(layout):
        measured = measurements_of(session, _setting(args), args.recompute_num_layers if partly else None)
        return tuple(
            rank_memory(
                measured,
                stages,
                layout,
                rank,
                microbatches=min(microbatches, FILLED * group),
                sharded=args.use_distributed_optimizer,
                group=group,
            )
            for rank in range(layout.pp)
        )


def _refuse_states(args: Namespace) -> None:
    """Raises ``ConfigError`` where the optimizer's state is another than `static_bytes` counts."""
    others = {
        f"--optimizer {args.optimizer}": args.optimizer != "adam",
        "--optimizer-cpu-offload": args.optimizer_cpu_offload,
        "--use-precision-aware-optimizer": args.use_precision_aware_optimizer,
        "--num-distributed-optimizer-instances": args.num_distributed_optimizer_instances > 1,
    }
    if given := [flag for flag, is_so in others.items() if is_so]:
        raise ConfigError(f"only the states of Adam in float32 are counted, and there is {', '.join(given)}")


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
