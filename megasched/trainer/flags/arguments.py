"""Adds megasched's flags to Megatron's, and fills in Megatron's own flags from the HF config.

All that describes the model comes from the HF config; all that the user says about the run (batch sizes, learning
rate, parallelism, data, checkpoints) stays the user's. A flag that contradicts the HF config, or that can't be
honoured under a schedule, is refused with all others of its kind in one message.
"""

from __future__ import annotations

import argparse
import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from megasched.definition.build import load_config
from megasched.definition.objectives import OBJECTIVES, find_objective
from megasched.errors import ConfigError
from megasched.language.parallel_dims import ParallelDims
from megasched.model_adapters.adapter_file import FLAG as ADAPTER_FLAG
from megasched.trace.run_trace import trace_conflicts
from megasched.trainer.flags.flag_classes import GivenFlag, explicit_flags, refusals, start_notes
from megasched.trainer.flags.flag_parser import FlagParser, megatron_parser
from megasched.trainer.flags.model_shape import derive, heads_for_tp
from megasched.trainer.flags.model_sizes import SourcedValue
from megasched.trainer.flags.moe import (
    expert_arguments,
    expert_conflicts,
    mixture_flags_asked,
    moe_conflicts,
)
from megasched.trainer.flags.position_limit import remedy
from megasched.trainer.flags.refused_flags import REFUSED
from megasched.trainer.flags.sft import sft_conflicts
from megasched.trainer.flags.te import fp8_from_args, te_conflicts
from megasched.trainer.hang_watch import FLAG as HANG_FLAG
from megasched.trainer.hang_watch import minutes

if TYPE_CHECKING:
    from transformers import PretrainedConfig


NULL_TOKENIZERS = ("NullTokenizer", "NullMultimodalTokenizer")


# Flag -> how argparse reads it, and what --help says.
FLAGS: dict[str, tuple[dict[str, Any], str]] = {
    "--model-schedule": (
        {"metavar": "FILE"},
        "How the model is run: a Python file that calls schedule primitives, or `auto` for the one that "
        "megasched derives from the model and the layout.",
    ),
    "--schedule-option": (
        {"metavar": "KEY=VALUE", "nargs": "+", "action": "extend", "default": []},
        "Given to the schedule function's parameter KEY; as in --model-schedule FILE:KEY=VALUE.",
    ),
    "--hf-model": (
        {"metavar": "DIR"},
        "The Hugging Face model that is trained: a folder with config.json and, unless --hf-random-init, "
        "safetensors; or a hub id, downloaded where the network allows.",
    ),
    "--hf-override": (
        {"metavar": "FIELD=VALUE", "nargs": "+", "action": "extend", "default": []},
        "Changes fields of the HF config before anything is built, e.g. num_hidden_layers=8; nested fields with "
        "dots. Values are JSON where they parse as such.",
    ),
    ADAPTER_FLAG: (
        {"metavar": "FILE"},
        "What megasched is told of the architecture: a Python file with ADAPTER = Adapter(...), as `megasched "
        "new-adapter --output FILE` writes it. It stands before an installed adapter.",
    ),
    "--hf-random-init": (
        {"action": "store_true"},
        "Initialise the weights as the HF definition does instead of loading them from --hf-model.",
    ),
    "--rehearse": (
        {"action": "store_true"},
        "Run the job on this machine's CPU, with CUDA emulated and gloo: the real trainer and schedules, to find "
        "mistakes before a GPU is held. Same as MEGASCHED_REHEARSE=1.",
    ),
    "--allow-unverified": (
        {"action": "store_true"},
        "Run an architecture at a layout where no check has shown that it computes what the definition does, with "
        "flags of Megatron that megasched does not know, or with newer packages than the tested ones.",
    ),
    "--require-certificate": (
        {"metavar": "FILE"},
        "Run only what this certificate speaks for: `megasched verify --certificate FILE` of the same schedule, "
        "model, versions and kinds of parallelism found it equal. It stands for --allow-unverified.",
    ),
    "--megasched-trace": (
        {"metavar": "FILE"},
        "Record when each rank ran which forward, backward, communication and optimizer step, and write it there "
        "in Chrome's trace format; of the iterations that --profile-step-start and --profile-step-end name.",
    ),
    HANG_FLAG: (
        {"metavar": "MINUTES", "type": minutes},
        "A rank that makes no step for so long prints the stacks of its threads and ends, and with it the run. "
        "It must be longer than a validation and a checkpoint take together.",
    ),
    "--objective": (
        {"choices": sorted(OBJECTIVES)},
        "What the model is trained to do, which says its Hugging Face class and what it is given; causal_lm by "
        "default. The scripts that come with megasched say it themselves.",
    ),
}
# Their `args` attributes; Megatron's alone have classes.
_OWN = frozenset(flag.removeprefix("--").replace("-", "_") for flag in FLAGS)


def flag_parser(megatron: argparse.ArgumentParser) -> FlagParser:
    """Returns a parser of megasched's flags and of those of ``megatron``, which may have a script's own."""
    own = argparse.ArgumentParser(add_help=False)
    return FlagParser(add_megasched_arguments(own, beside=megatron), megatron)


def add_megasched_arguments(
    parser: argparse.ArgumentParser, beside: argparse.ArgumentParser | None = None
) -> argparse.ArgumentParser:
    """Adds the argument group ``megasched`` and returns the parser.

    Args:
        beside: a parser that reads the same command line; the same one by default.
    """
    group = parser.add_argument_group("megasched")
    for flag, (reading, text) in FLAGS.items():
        group.add_argument(flag, help=text, **reading)
    # Megatron has the flag for its tokenizers; here it covers the model as well.
    if "--trust-remote-code" not in (beside or parser)._option_string_actions:
        what = "Run Python code that comes with --hf-model."
        group.add_argument("--trust-remote-code", action="store_true", help=what)
    return parser


def load_hf_config(args: argparse.Namespace) -> PretrainedConfig:
    """Loads the HF config that these flags name, overrides applied; each caller gets its own copy.

    Raises:
        ConfigError: there is no --hf-model, its config can't be read, or an override does not fit.
    """
    if not args.hf_model:
        raise ConfigError("--model-schedule needs --hf-model: the model that the schedule is for")
    return copy.deepcopy(_load(args.hf_model, tuple(args.hf_override), bool(args.trust_remote_code)))


@lru_cache(maxsize=1)
def _load(hf_model: str, overrides: tuple[str, ...], trust_remote_code: bool) -> PretrainedConfig:
    return load_config(hf_model, overrides, trust_remote_code=trust_remote_code)


def apply_derived(args: argparse.Namespace, given: Mapping[str, GivenFlag]) -> list[str]:
    """Sets on ``args`` what Megatron must know of the model; to be called before Megatron validates them.

    ``padded_vocab_size`` becomes the HF vocabulary rounded up to a multiple of
    ``--make-vocab-size-divisible-by`` times TP; Megatron's tokenizer builder leaves it alone then
    (``core/tokenizers/utils/build_tokenizer.py:140``).

    Args:
        args: as Megatron parsed them.
        given: the flags that the user gave (`explicit_flags`).

    Returns:
        What the start of the run is to say of the flags.

    Raises:
        ConfigError: flags that contradict the HF config or can't be honoured under a schedule, a sequence
            longer than the model's positions; all of them in one message.
    """
    if "yaml_cfg" in given:
        # `args` is what the file says: there is nothing here to compare with.
        raise ConfigError(f"{given['yaml_cfg']} can't be used under a schedule: {REFUSED['yaml_cfg']}")
    config, objective = load_hf_config(args), find_objective(args.objective)
    tp_facts = derive(config, objective, trust_remote_code=bool(args.trust_remote_code))
    vocab = tp_facts.pop("vocab_size")
    tp_facts["padded_vocab_size"] = _padded(vocab, args)
    if args.expert_model_parallel_size > 1 or mixture_flags_asked(args):
        tp_facts |= expert_arguments(args, config, objective, tp_facts)
    positions = tp_facts["position_embedding_type"]
    tp_facts["use_rotary_position_embeddings"] = SourcedValue(positions.value == "rope", positions.source)
    lengths = _lengths(args, tp_facts)
    if "max_position_embeddings" not in tp_facts:
        longest = max(args.max_position_embeddings or 0, *lengths.values()) or None
        tp_facts["max_position_embeddings"] = SourcedValue(longest, "no limit in the HF config")
    problems = [
        _report("Flags that contradict the HF config", _contradictions(tp_facts, given), _CONTRADICTION_REMEDY),
        _report(_REFUSED_TITLE, refusals(_megatrons(given), unknown=not args.allow_unverified)),
        _report("Sizes that do not fit the model", _size_conflicts(args, config, lengths, vocab, tp_facts)),
        _report("Flags of expert parallelism that do not fit", [*expert_conflicts(args), *moe_conflicts(args)]),
        _report("Flags that Transformer Engine can't carry out here", te_conflicts(args)),
        _report("Flags of fine-tuning that do not fit", sft_conflicts(args)),
        _report("Iterations that can't be recorded", trace_conflicts(args)),
    ]
    if any(problems):
        raise ConfigError("\n".join([f"--hf-model {args.hf_model}:", *filter(None, problems)]))
    args.expert_tensor_parallel_size = 1  # experts are whole; Megatron would take TP's
    for dest, found in heads_for_tp(tp_facts, args.tensor_model_parallel_size).items():
        setattr(args, dest, found.value)
    if args.tokenizer_type in NULL_TOKENIZERS and args.vocab_size is None:
        args.vocab_size = vocab.value
    return start_notes(_megatrons(given), {*tp_facts, "expert_tensor_parallel_size"})


_REFUSED_TITLE = "Flags that can't be used under a schedule"
_CONTRADICTION_REMEDY = (
    "Leave these flags out, megasched takes them from the HF config; to change the model itself, "
    "say --hf-override FIELD=VALUE."
)


def refuse_unsupported(argv: Sequence[str]) -> argparse.Namespace:
    """Refuses the flags of ``argv`` that can't be used under a schedule, whatever the model; returns them parsed.

    `apply_derived` does so too, for the command line that Megatron parses. A rehearsal asks here first, for
    the one that will run on the cluster: flags that it leaves out must not hide that they are refused there.
    What they ask of the model is for `on_cluster` to tell.

    Raises:
        ConfigError: with all of them.
    """
    parser = flag_parser(megatron_parser())
    args = parser.parse_known_args(list(argv))[0]
    given = explicit_flags(parser, argv)
    lines = refusals(_megatrons(given), unknown="allow_unverified" not in given)
    if lines:
        raise ConfigError(_report(_REFUSED_TITLE, lines))
    return args


def on_cluster(layout: ParallelDims, args: argparse.Namespace) -> ParallelDims:
    """Returns the layout of a rehearsal with what its flags on the cluster ask of the model beside it.

    Sizes that 8 bits want are left alone: the model of a rehearsal is smaller.
    """
    return replace(layout, tp_comm_overlap=args.tp_comm_overlap, mixture_flags=mixture_flags_asked(args))


def _megatrons(given: Mapping[str, GivenFlag]) -> dict[str, GivenFlag]:
    return {dest: flag for dest, flag in given.items() if dest not in _OWN}


def _report(title: str, lines: Sequence[str], remedy: str = "") -> str:
    if not lines:
        return ""
    return "\n".join([f"{title}:", *(f"  - {line}" for line in lines), *([remedy] if remedy else [])])


def _padded(vocab: SourcedValue, args: argparse.Namespace) -> SourcedValue:
    multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
    padded = math.ceil(vocab.value / multiple) * multiple
    return SourcedValue(padded, f"{vocab.source}, padded to a multiple of {multiple}: {padded}")


def _agree(given: Any, tp_facts: Any) -> bool:
    if isinstance(given, float) and isinstance(tp_facts, int | float):
        return math.isclose(given, tp_facts, rel_tol=1e-6)
    return given == tp_facts


def _contradictions(tp_facts: Mapping[str, SourcedValue], given: Mapping[str, GivenFlag]) -> list[str]:
    lines = []
    for dest, flag in given.items():
        # --group-query-attention only says that --num-query-groups counts.
        implied = dest == "group_query_attention" and "num_query_groups" in given
        if dest in tp_facts and not implied and not _agree(flag.value, tp_facts[dest].value):
            lines.append(f"{flag}, but {tp_facts[dest].source}")
    return lines


def _lengths(args: argparse.Namespace, tp_facts: Mapping[str, SourcedValue]) -> dict[str, int]:
    """Returns the lengths of sequences by their flags, 0 for one that is not given, and says one in one place.

    What reads ``args.seq_length`` before Megatron validates it finds there what ``--encoder-seq-length`` says.
    """
    fixed = tp_facts.get("seq_length")
    if args.seq_length is None and not fixed:
        args.seq_length, args.encoder_seq_length = args.encoder_seq_length, None
    sequence = fixed.value if fixed else args.seq_length
    return {"--seq-length": sequence or 0, "--decoder-seq-length": args.decoder_seq_length or 0}


def _size_conflicts(
    args: argparse.Namespace,
    config: PretrainedConfig,
    lengths: Mapping[str, int],
    vocab: SourcedValue,
    tp_facts: Mapping[str, SourcedValue],
) -> list[str]:
    lines = []
    longest = tp_facts["max_position_embeddings"]
    for flag, length in lengths.items():
        if not longest.value or length <= longest.value:
            continue
        field = longest.source.partition(" ")[0]
        learned = tp_facts["position_embedding_type"].value == "learned_absolute"
        way = (
            "the model has a learned table of positions, and no rows for more"
            if learned
            else remedy(config, field, length)
        )
        lines.append(f"{flag} {length}, but {longest.source}: {way}")
    if args.tokenizer_type in NULL_TOKENIZERS and args.vocab_size and args.vocab_size > vocab.value:
        lines.append(f"--vocab-size {args.vocab_size} of the {args.tokenizer_type}, but {vocab.source}")
    return lines


def check_tokenizer(args: argparse.Namespace, tokenizer: Any) -> None:
    """Refuses a tokenizer that has more tokens than the model has rows; fewer are fine.

    Args:
        args: parsed flags.
        tokenizer: Megatron's, as ``get_tokenizer()`` returns it.

    Raises:
        ConfigError: with both sizes.
    """
    vocab, _ = find_objective(args.objective).classes(load_hf_config(args))
    if tokenizer.vocab_size > vocab:
        named = args.tokenizer_model or args.vocab_file or args.tokenizer_type
        raise ConfigError(
            f"the tokenizer ({named}) has {tokenizer.vocab_size} tokens, but the model (--hf-model "
            f"{args.hf_model}) has vocab_size = {vocab}: ids from {vocab} on would have no embedding. Use "
            f"the tokenizer that belongs to the model, or --hf-override vocab_size={tokenizer.vocab_size} "
            "with --hf-random-init"
        )


def layout_from_args(args: argparse.Namespace) -> ParallelDims:
    """Returns the layout of Megatron's flags, validated by Megatron or not yet (``num_layers`` must be set).

    What Megatron computes in ``validate_args`` (``training/arguments.py:452,904``) is computed here the same
    way when it is missing: DP from the number of ranks, VPP from whichever flag gives it.

    Raises:
        ConfigError: the number of ranks is no multiple of TP x PP x CP.
    """
    tp, pp, cp = (
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        args.context_parallel_size,
    )
    if args.world_size % (tp * pp * cp):
        raise ConfigError(f"{args.world_size} ranks are no multiple of TP {tp} x PP {pp} x CP {cp}")
    known = hasattr(args, "virtual_pipeline_model_parallel_size")
    return ParallelDims(
        tensor_model_parallel_size=tp,
        sequence_parallel=args.sequence_parallel,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=(
            args.virtual_pipeline_model_parallel_size if known else _virtual_stages(args)
        ),
        context_parallel_size=cp,
        expert_model_parallel_size=args.expert_model_parallel_size,
        data_parallel_size=args.world_size // (tp * pp * cp),
        micro_batch_size=args.micro_batch_size or 1,
        fp8=fp8_from_args(args),
        tp_comm_overlap=args.tp_comm_overlap,
        mixture_flags=mixture_flags_asked(args),
        packed_sequences=args.sft,
    )


def _virtual_stages(args: argparse.Namespace) -> int | None:
    """Returns VPP from flags that are not validated; None without interleaving."""
    pp = args.pipeline_model_parallel_size
    stages = args.num_virtual_stages_per_pipeline_rank
    if args.pipeline_model_parallel_layout is not None:
        from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

        total = PipelineParallelLayerLayout.get_num_stages_from_str(args.pipeline_model_parallel_layout)
        stages = total // pp
    elif stages is None and args.num_layers_per_virtual_pipeline_stage is not None:
        layers = args.num_layers + args.account_for_embedding_in_pipeline_split
        layers += args.account_for_loss_in_pipeline_split
        stages = layers // pp // args.num_layers_per_virtual_pipeline_stage
    return None if stages == 1 else stages
