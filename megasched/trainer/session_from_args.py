"""Opens the process's session from flags that Megatron has parsed, with its checks, defaults and notices."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Container, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from megasched.definition.build import kept_in_float32
from megasched.definition.experts import find_experts
from megasched.errors import ConfigError, Problem, ScheduleError, some_of
from megasched.language.lora import adapted, adapter_names
from megasched.language.schedule_file import add_options
from megasched.plan.decisions import without_rule
from megasched.plan.fp8 import left_in_16_bits
from megasched.plan.plan import Plan
from megasched.trainer.checkpoint.source import weight_source
from megasched.trainer.current_session import cluster_flags, set_session
from megasched.trainer.evidence.certificate import require_certificate, subject_of
from megasched.trainer.evidence.compatibility import (
    of_unchecked_options,
    refuse_unverified,
    unchecked_options,
    verify_command,
)
from megasched.trainer.flags.arguments import layout_from_args, on_cluster
from megasched.trainer.flags.honoured_flags import MLA_UP_PROJ
from megasched.trainer.flags.sft import default_sft_args, refuse_splits
from megasched.trainer.flags.te import configure_attention_backend, default_args_without_te
from megasched.trainer.losses.definition_loss import loss_lines, refuse_loss_of_batches, refuse_per_token
from megasched.trainer.session import Session, open_session, refuse_changes_of_evaluation
from megasched.trainer.stages.shared_parameters import refuse_overlap
from megasched.trainer.unreached import refuse_unsure_overlap, unreached_lines
from megasched.weights.hf.folder import HFFolder
from megasched.weights.lora import AdaptedSource
from megasched.weights.source import WeightSource, of_passed_over

# Flags by which a user cuts the pipeline; Megatron's own rules hold where one is given.
CUT_FLAGS = (
    *("pipeline_model_parallel_layout", "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"),
    *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
)


def begin_session(args: Namespace, given: Container[str]) -> None:
    """Opens the process's session from flags that Megatron has parsed but not validated, and plans it.

    Where neither the flags nor Megatron's own rules for uneven stages say how the pipeline is cut,
    ``args.pipeline_model_parallel_layout`` is set.

    Raises:
        ConfigError, ScheduleError: whatever can't be used as given.
    """
    _refuse_missing(args)
    refuse_splits(args)
    schedule = add_options(args.model_schedule, args.schedule_option or ())
    session = open_session(
        schedule,
        args.hf_model,
        layout_from_args(args),
        overrides=args.hf_override or (),
        trust_remote_code=bool(args.trust_remote_code),
        objective=args.objective,
        adapter=args.adapter,
        make_vocab_size_divisible_by=args.make_vocab_size_divisible_by,
    )
    session.freeze_unreached(args.micro_batch_size, args.seq_length)
    _refuse_on_cluster(session)
    _ask_for_evidence(session, schedule, args)
    _refuse_batches(session, args)
    source = weight_source(args, session.definition)
    _describe_run(session, source, args)
    _cut_pipeline(session, args, given)
    for line in _notices(session, source, args) if args.rank == 0 else ():
        print(f"megasched: {line}")
    _default_accumulation_args(args)
    default_args_without_te(args)
    configure_attention_backend(args)
    _default_evaluation_args(args)
    default_sft_args(args)
    set_session(session)


def _refuse_on_cluster(session: Session) -> None:
    """Refuses in a rehearsal what the plan on the cluster refuses, by flags that a rehearsal leaves out.

    Raises:
        ScheduleError: a layer can't overlap its communication, or a mixture is not Megatron's.
    """
    flags, layout = cluster_flags(), session.schedule.layout
    if flags is not None and on_cluster(layout, flags) != layout:
        session.with_layout(on_cluster(layout, flags)).plan  # noqa: B018  # made for its problems


def _ask_for_evidence(session: Session, schedule: str, args: Namespace) -> None:
    """Refuses a run without evidence that it computes what the definition does."""
    if args.require_certificate is not None:
        subject = subject_of(schedule, session.definition, session.plan.layout, args.adapter)
        require_certificate(Path(args.require_certificate), subject)
    elif not args.allow_unverified:
        refuse_unverified(session.definition, session.plan.layout)
        _warn_of_options(session, args)


def _refuse_missing(args: Namespace) -> None:
    """Refuses a run without the sizes of its batches, with which the model is planned.

    Raises:
        ConfigError: with those that are missing.
    """
    sizes = {"--seq-length": args.seq_length, "--micro-batch-size": args.micro_batch_size}
    missing = [flag for flag, size in sizes.items() if size is None]
    if missing:
        raise ConfigError(f"{' and '.join(missing)} missing: say how large the batches of the run are")


def _refuse_length(args: Namespace) -> None:
    """Refuses sequences that sequence parallelism can't cut; Megatron asserts it in the first forward.

    Raises:
        ConfigError: for ``--sequence-parallel``.
    """
    rows = args.micro_batch_size if args.sft else 1  # which are joined
    tp, length = args.tensor_model_parallel_size, rows * args.seq_length // args.context_parallel_size
    if args.sequence_parallel and length % tp:
        raise ConfigError(
            f"--sequence-parallel cuts each sequence into TP = {tp} parts, and {tp} does not divide the {length} "
            "positions that a rank has of it (--seq-length); run it without --sequence-parallel, or with another "
            "length where the model has no fixed one"
        )


def _refuse_joined_rows(plan: Plan, rows: int) -> None:
    """Refuses several rows in validation where the plan is for one (``plan_packed_rows``).

    Raises:
        ConfigError: for ``--eval-micro-batch-size``.
    """
    packed, by_megatron = plan.packed, plan.blocks | plan.attentions
    if packed is not None and not packed.problems and by_megatron and plan.layout.sp and rows > 1:
        raise ConfigError(
            f"--eval-micro-batch-size {rows}: Megatron's attention ({min(by_megatron)}) takes packed sequences as "
            "one row, and sequence parallelism has split several; say --eval-micro-batch-size 1, or use "
            "level('fused')"
        )


def _refuse_batches(session: Session, args: Namespace) -> None:
    """Refuses a run whose micro-batches, or Megatron's handling of their gradients, do not go with the plan."""
    plan, rows = session.plan, (args.micro_batch_size, args.eval_micro_batch_size or args.micro_batch_size)
    refuse_loss_of_batches(session.replaced, plan.structure, ((each, args.seq_length) for each in rows))
    _refuse_length(args)
    _refuse_joined_rows(plan, rows[1])
    refuse_per_token(plan, args.calculate_per_token_loss)
    refuse_overlap(plan, args.overlap_grad_reduce)
    refuse_unsure_overlap(session.reach, plan.structure, args.overlap_grad_reduce)
    _refuse_offload(session, args)
    if args.eval_interval is not None and (args.eval_iters or args.full_validation):
        refuse_changes_of_evaluation(session, saves=args.save is not None)


def _refuse_offload(session: Session, args: Namespace) -> None:
    """Refuses to offload the optimizer of parameters that stay in float32: Megatron hands it views of these.

    Raises:
        ConfigError: for ``--optimizer-cpu-offload``.
    """
    dtype = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else torch.float32
    frozen = {name for name, parameter in session.replaced.named_parameters() if not parameter.requires_grad}
    kept = kept_in_float32(session.definition, dtype, session.plan.placements.keys() - frozen)
    if args.optimizer_cpu_offload and kept:
        raise ConfigError(
            f"--optimizer-cpu-offload: the model keeps {some_of(sorted(kept))} in float32 beside {dtype}, and "
            "Megatron's offloading optimizer can't take these (`can't optimize a non-leaf Tensor`); run it without"
        )


def _describe_run(session: Session, source: WeightSource, args: Namespace) -> None:
    """Sets on the session what the flags say of the run: where its weights come from, and its batches."""
    session.hf_model = Path(args.hf_model)
    adapters = adapter_names(adapted(session.schedule.records))
    session.source = AdaptedSource(source, adapters, args.seed) if adapters else source
    session.batch_shape = args.micro_batch_size, args.seq_length
    session.eval_micro_batch_size = args.eval_micro_batch_size
    session.recomputes_up_projections = _set_latent_aside(args)
    session.source.check({placement.name for placement in session.plan.placements.values()})


def _set_latent_aside(args: Namespace) -> bool:
    """Takes ``mla_up_proj`` out of ``--recompute-modules``; returns whether it was there.

    Megatron refuses it where the trainer's own config has no latent attention
    (``core/transformer/transformer_config.py:1789``), and which layers have some is for the schedule to say.
    """
    asked = args.recompute_modules or []
    if MLA_UP_PROJ not in asked:
        return False
    args.recompute_modules = [name for name in asked if name != MLA_UP_PROJ]
    return True


def _cut_pipeline(session: Session, args: Namespace, given: Container[str]) -> None:
    """Tells Megatron how many layers there are, and which stage has which of them."""
    plan = session.plan
    # Of an encoder-decoder's config HF reads the other stack's depth.
    if plan.structure is not None and not plan.structure.repeated:
        args.num_layers = plan.structure.count
        if isinstance(args.moe_layer_freq, list):  # the config may count otherwise: LongCat's counts attentions
            having = {plan.structure.index_of(path) for path in find_experts(session.replaced)}
            args.moe_layer_freq = [int(layer in having) for layer in range(args.num_layers)]
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


def parameter_counts(model: Any) -> tuple[int, int]:
    """Returns (number of a definition's parameters, number of those that are trained); ties count once."""
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    return sum(size for size, _ in sizes), sum(size for size, trained in sizes if trained)


def _notices(session: Session, source: WeightSource, args: Namespace) -> Iterator[str]:
    """Yields a line for each thing that a user may not expect of this run."""
    plan, definition = session.plan, session.definition
    if isinstance(source, HFFolder) and source.passed_over:
        yield of_passed_over(type(definition).__name__, source.passed_over)
    if count := len(adapted(session.schedule.records)):
        whole, trained = parameter_counts(session.replaced)
        yield (f"LoRA on {count} linears: {trained:,} of {whole:,} parameters are trained ({trained / whole:.2%})")
    yield from unreached_lines(session.replaced, session.reach)
    if left := left_in_16_bits(plan, session.replaced):
        yield f"linears that stay in 16 bits: {some_of(left)}"
    # The optimizer has copies of these in 32 bits, which a forward does not write to.
    written = sorted(plan.structure.changed_parameters) if plan.structure is not None else []
    if written and (args.bf16 or args.fp16):
        yield f"a forward writes to {some_of(written)}; each step of the optimizer undoes that, in 16 bits"
    yield from without_rule(plan)
    yield from loss_lines(plan)


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
        objective=args.objective,
        adapter=args.adapter,
    )
    print(f"megasched: warning: {of_unchecked_options(options, command)}")


def _default_accumulation_args(args: Namespace) -> None:
    """Turns off gradient accumulation fusion, which Megatron's scripts turn on, where its kernel is missing."""
    if args.gradient_accumulation_fusion and find_spec("fused_weight_gradient_mlp_cuda") is None:
        args.gradient_accumulation_fusion = False
        if args.rank == 0:
            print("megasched: gradient accumulation fusion is off: NVIDIA apex's kernel for it is not installed")


def _default_evaluation_args(args: Namespace) -> None:
    """Sets an evaluation interval longer than any run where ``--eval-interval`` is not given.

    Megatron promises no evaluation during training then, and yet divides by it (``training/training.py:4481``).
    """
    if args.eval_interval is None:
        args.eval_interval = sys.maxsize
        if args.rank == 0:
            print("megasched: no --eval-interval, so nothing is evaluated during training")
