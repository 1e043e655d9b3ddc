"""Collects facts about a run that is about to begin, in the process of ``check_process.py``: sizes, memory, data.

It imports Megatron, so it must be imported after the process is arranged.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Iterator
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

from megatron.training.global_vars import get_args
from megatron.training.training import get_optimizer_param_scheduler
from megatron.training.utils import get_blend_and_blend_per_split

from megasched.errors import ConfigError, MegaschedError
from megasched.planner.run_memory import run_memory
from megasched.trainer.builder import stages_of_run
from megasched.trainer.checkpoint.load_check import check_load
from megasched.trainer.current_session import get_session
from megasched.trainer.run_failure import describe_failure
from megasched.trainer.session import Session
from megasched.trainer.session_from_args import parameter_counts
from megasched.trainer.token_ids import check_data, vocabulary_of

# Bytes of a number in a checkpoint of Adam's: master weight and two moments, in float32.
_OF_OPTIMIZER = 12
# By their names in Megatron's arguments.
OF_LEARNING_RATE = ("lr", "min_lr", "lr_warmup_init", "train_iters", "lr_decay_iters", "lr_warmup_iters")
OF_LEARNING_RATE += ("train_samples", "lr_decay_samples", "lr_warmup_samples", "lr_warmup_fraction")


def look_at_run(config: Any, found: dict[str, Any]) -> None:
    """Collects facts, problems and warnings of a run that is about to begin.

    Args:
        config: Megatron's ``PretrainConfigContainer``.
        found: findings, which are added to.
    """
    args, session = get_args(), get_session()
    layout = session.plan.layout
    microbatches = args.global_batch_size // (args.micro_batch_size * layout.data_parallel_size)
    found["problems"] += [
        *_interleaving(args, layout, microbatches),
        *_learning_rate(args),
        *_data(args, vocabulary_of(session.definition.config)),
        *_checkpoint(args, session),
    ]
    if args.log_straggler and find_spec("pynvml") is None:
        found["warnings"].append(
            "--log-straggler asks for the temperature and power of GPUs, by nvidia-ml-py, which is not installed "
            "here; where it is missing the run fails at the first log interval: pip install nvidia-ml-py"
        )
    numbers, trained = parameter_counts(session.definition)
    of_optimizer = 0 if args.no_save_optim else trained * _OF_OPTIMIZER
    found |= {
        "parameters": numbers,
        "layout": str(layout),
        "microbatches": microbatches,
        "train_iters": args.train_iters,
        "save": args.save,
        "checkpoint_bytes": numbers * args.params_dtype.itemsize + of_optimizer,
        "seq_length": args.seq_length,
        "global_batch_size": args.global_batch_size,
    }
    if found["problems"] or session.plan.structure is None:
        return
    try:
        stages = stages_of_run(config.model.transformer, session.plan.structure, layout.pp)
        memory = run_memory(args, session, stages, microbatches=microbatches)
        found["memory"] = [one.total for one in memory]
    except ConfigError as error:
        found["memory_unknown"] = str(error)


def _interleaving(args: Namespace, layout: Any, microbatches: int) -> Iterator[str]:
    """Yields what Megatron would refuse in the first step (core/pipeline_parallel/schedules.py:1133-1153)."""
    if layout.vpp == 1:
        return
    group = args.microbatch_group_size_per_vp_stage or layout.pp
    if group < layout.pp:
        flag = "--microbatch-group-size-per-virtual-pipeline-stage"
        yield f"{flag} {group}: Megatron takes PP at least, {layout.pp}"
        return
    rest = microbatches % group
    if microbatches < group or 0 < rest < layout.pp:
        share = args.micro_batch_size * layout.data_parallel_size
        right = math.ceil(microbatches / group) * group * share
        yield (
            f"--global-batch-size {args.global_batch_size} gives each pipeline {microbatches} micro-batches; "
            f"interleaved ones (VPP {layout.vpp}) go in groups of {group}: {right} would be right"
        )


def _learning_rate(args: Namespace) -> Iterator[str]:
    """Yields what Megatron would refuse when the model is built: a warm-up longer than the run, say."""
    try:
        get_optimizer_param_scheduler(SimpleNamespace(param_groups=[]))
    except Exception as error:  # Megatron raises assertions, and Exception itself
        given = {name: value for name in OF_LEARNING_RATE if (value := getattr(args, name))}
        flags = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in given.items())
        yield f"Megatron refuses the learning rate's schedule, of {flags}: {describe_failure(error)}"


def _data(args: Namespace, vocabulary: int | None) -> Iterator[str]:
    """Yields a problem for data that is missing, is damaged, or has ids that the model does not know."""
    if args.mock_data:
        return
    try:
        blend, per_split = get_blend_and_blend_per_split(args)
    except OSError as error:
        yield f"the list of data can't be read: {error}"
        return
    blends = [blend, *(per_split or ())]
    for prefix in sorted({prefix for one in blends if one is not None for prefix in one[0]}):
        if "://" in prefix:
            continue
        try:
            check_data(prefix, vocabulary, args.data_cache_path)
        except ConfigError as error:
            yield str(error)


def _checkpoint(args: Namespace, session: Session) -> Iterator[str]:
    """Yields why the checkpoint that the run is to load is refused by it."""
    try:
        check_load(args, session)
    except MegaschedError as error:
        yield str(error)
