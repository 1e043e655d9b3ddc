"""From flags that Megatron has parsed to the process's session: what is checked, settled and said on the way."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Container
from pathlib import Path
from typing import Any

from megasched.errors import Problem, ScheduleError, some_of
from megasched.language.lora import adapted, adapter_names
from megasched.plan.decisions import without_rule
from megasched.plan.fp8 import left_in_16_bits
from megasched.plan.plan import Plan
from megasched.trainer.evidence.certificate import require_certificate, subject_of
from megasched.trainer.evidence.compatibility import (
    of_unchecked_options,
    refuse_unverified,
    unchecked_options,
    verify_command,
)
from megasched.trainer.flags.sft import default_sft_args
from megasched.trainer.flags.te import configure_attention_backend, default_args_without_te
from megasched.trainer.losses.definition_loss import loss_lines, refuse_loss_of_batches, refuse_per_token
from megasched.trainer.session import Session, open_session, set_session
from megasched.trainer.stages.shared_parameters import refuse_overlap
from megasched.trainer.unreached import refuse_unsure_overlap, tell_of_unreached
from megasched.weights.hf.folder import HFFolder
from megasched.weights.lora import AdaptedSource
from megasched.weights.source import WeightSource, of_passed_over

# Flags by which a user cuts the pipeline; Megatron's own rules hold where one is given.
CUT_FLAGS = (
    "pipeline_model_parallel_layout",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)


def begin_session(args: Namespace, given: Container[str]) -> None:
    """Opens the process's session from flags that Megatron has parsed but not validated, and plans it.

    Where neither the flags nor Megatron's own rules for uneven stages say how the pipeline is cut,
    ``args.pipeline_model_parallel_layout`` is set.

    Raises:
        ConfigError, ScheduleError: whatever can't be used as given.
    """
    from megasched.language.schedule_file import add_options
    from megasched.trainer.checkpoint.source import weight_source
    from megasched.trainer.flags.arguments import layout_from_args

    schedule = add_options(args.model_schedule, args.schedule_option or ())
    session = open_session(
        schedule,
        args.hf_model,
        layout_from_args(args),
        overrides=args.hf_override or (),
        trust_remote_code=bool(args.trust_remote_code),
        objective=args.objective,
        make_vocab_size_divisible_by=args.make_vocab_size_divisible_by,
    )
    session.freeze_unreached(args.micro_batch_size, args.seq_length)
    plan = session.plan
    if args.require_certificate is not None:
        subject = subject_of(schedule, session.definition, plan.layout)
        require_certificate(Path(args.require_certificate), subject)
    elif not args.allow_unverified:
        refuse_unverified(session.definition, plan.layout)
        _warn_of_options(session, args)
    rows = (args.micro_batch_size, args.eval_micro_batch_size or args.micro_batch_size)
    refuse_loss_of_batches(session.replaced, plan.structure, ((each, args.seq_length) for each in rows))
    refuse_per_token(plan, args.calculate_per_token_loss)
    refuse_overlap(plan, args.overlap_grad_reduce)
    refuse_unsure_overlap(session.reach, plan.structure, args.overlap_grad_reduce)
    session.hf_model = Path(args.hf_model)
    source = weight_source(args, session.definition)
    adapters = adapter_names(adapted(session.schedule.records))
    session.source = AdaptedSource(source, adapters, args.seed) if adapters else source
    session.batch_shape = args.micro_batch_size, args.seq_length
    session.eval_micro_batch_size = args.eval_micro_batch_size
    session.source.check({placement.name for placement in plan.placements.values()})
    # Of an encoder-decoder's config HF reads the other stack's depth.
    if plan.structure is not None and not plan.structure.repeated:
        args.num_layers = plan.structure.count
    flags = [name for name in CUT_FLAGS if name in given]
    cuts = plan.records_of("cut_pipeline_stage")
    if flags and cuts:
        what = f"the schedule cuts the pipeline, and so does --{flags[0].replace('_', '-')}"
        raise ScheduleError(Problem(what, cuts[0].path, cuts[0].source, "keep one of the two"))
    if not flags:
        args.pipeline_model_parallel_layout = session.pipeline_layout(args.seq_length)
        if args.pipeline_model_parallel_layout is not None:  # says how many chunks there are, too
            args.num_layers_per_virtual_pipeline_stage = None
            args.num_virtual_stages_per_pipeline_rank = None
    _tell_of_passed_over(source, session, args.rank)
    _tell_of_adapters(session, args.rank)
    tell_of_unreached(session.replaced, session.reach, args.rank)
    _tell_of_16_bits(session, args.rank)
    _tell_of_written(session.plan, args)
    for line in (*without_rule(plan), *loss_lines(plan)) if args.rank == 0 else ():
        print(f"megasched: {line}")
    _default_accumulation_args(args)
    default_args_without_te(args)
    configure_attention_backend(args)
    _default_evaluation_args(args)
    default_sft_args(args)
    set_session(session)


def _tell_of_passed_over(source: WeightSource, session: Session, rank: int) -> None:
    """What is stored and not trained, because the class leaves it aside, is said."""
    names = source.passed_over if isinstance(source, HFFolder) else []
    if names and rank == 0:
        print(f"megasched: {of_passed_over(type(session.definition).__name__, names)}")


def parameter_counts(model: Any) -> tuple[int, int]:
    """(parameters of a definition, those of them that are trained); ties once."""
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    return sum(size for size, _ in sizes), sum(size for size, trained in sizes if trained)


def _tell_of_adapters(session: Session, rank: int) -> None:
    """How much of the model is trained, where LoRA adapts it, is said."""
    count = len(adapted(session.schedule.records))
    if count and rank == 0:
        whole, trained = parameter_counts(session.replaced)
        print(
            f"megasched: LoRA on {count} linears: {trained:,} of {whole:,} parameters are trained "
            f"({trained / whole:.2%})"
        )


def _tell_of_16_bits(session: Session, rank: int) -> None:
    """What 8-bit training was asked for and does not reach is said."""
    left = left_in_16_bits(session.plan, session.replaced)
    if left and rank == 0:
        print(f"megasched: linears that stay in 16 bits: {some_of(left)}")


def _tell_of_written(plan: Plan, args: Namespace) -> None:
    """What a forward writes to parameters of 16 bits does not reach the optimizer's copies of them, in 32."""
    names = sorted(plan.structure.changed_parameters) if plan.structure is not None else []
    if names and (args.bf16 or args.fp16) and args.rank == 0:
        print(
            f"megasched: a forward writes to {some_of(names)}; each step of the optimizer undoes that, in 16 bits"
        )


def _warn_of_options(session: Session, args: Namespace) -> None:
    options = unchecked_options(session.definition) if args.rank == 0 else []
    if not options:
        return
    command = verify_command(
        args.model_schedule,
        args.hf_model,
        session.schedule.layout,
        overrides=args.hf_override or (),
        trust_remote_code=bool(args.trust_remote_code),
    )
    print(f"megasched: warning: {of_unchecked_options(options, command)}")


def _default_accumulation_args(args: Namespace) -> None:
    """Gradient accumulation fusion is on by default in Megatron's scripts; without its kernel it can't be."""
    from importlib.util import find_spec

    if args.gradient_accumulation_fusion and find_spec("fused_weight_gradient_mlp_cuda") is None:
        args.gradient_accumulation_fusion = False
        if args.rank == 0:
            print("megasched: gradient accumulation fusion is off: NVIDIA apex's kernel for it is not installed")


def _default_evaluation_args(args: Namespace) -> None:
    """Megatron promises no evaluation during training without ``--eval-interval``, and then divides by it
    (``training/training.py:4481``); an interval longer than any run keeps the promise."""
    if args.eval_interval is None:
        args.eval_interval = sys.maxsize
        if args.rank == 0:
            print("megasched: no --eval-interval, so nothing is evaluated during training")
