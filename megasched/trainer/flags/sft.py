"""Checks and sets what Megatron's fine-tuning data (``--sft``) needs, before anything is built."""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from itertools import islice

from megasched.errors import ConfigError
from megasched.reading.files import Expected, open_regular
from megasched.reading.json_file import parse_json

TOKENIZER = "SFTTokenizer"
# The tokens that begin turns in Megatron's own prompt formats
# (megatron/core/tokenizers/text/libraries/sft_tokenizer.py).
MARKS = {
    "nemotron-h-aligned": ("<SPECIAL_10>", "<SPECIAL_11>", "<SPECIAL_233>"),
    "nemotron-nano-v2": ("<SPECIAL_10>", "<SPECIAL_11>", "<SPECIAL_12>", "<unk>"),
    "identity": ("<unk>",),
}
CONVERSATIONS = Expected('lines of {"messages": [{"role": "system", "content": "..."}, ...]}')
_FORM = {"messages": [{"role": str}]}
_LINES = 1000  # that are looked at: of a large file, those that show what it is


def check_conversations(path: str, flag: str) -> None:
    """Checks the first lines of a file of conversations (``.jsonl``), whose faults Megatron says without a name.

    Raises:
        ConfigError: one is no conversation, or there is none.
    """
    if "://" in path or not path.endswith(".jsonl"):
        return
    expected, found = CONVERSATIONS.named_by(flag), 0
    with open_regular(path, expected) as file:
        for number, line in enumerate(islice(file, _LINES), start=1):
            if not line.strip():
                continue
            try:
                messages = parse_json(line.decode(), _FORM)["messages"]
            except ValueError as error:
                raise expected.refusal(path, f"line {number}: {str(error).removeprefix('line 1, ')}") from error
            if not messages:
                raise expected.refusal(path, f"line {number}: messages is empty")
            found += 1
    if not found:
        raise expected.refusal(path, "it has no line")


def sft_conflicts(args: argparse.Namespace) -> list[str]:
    """Returns a line for each flag that does not go with ``--sft``; empty without it.

    Args:
        args: as Megatron parsed them, validated or not.
    """
    if not args.sft:
        return []
    lines = []
    if find_spec("datasets") is None:
        lines.append("--sft reads JSON lines with Hugging Face's `datasets`: pip install 'megasched[sft]'")
    if args.mock_data:
        lines.append("--mock-data has no conversations: name a file of JSON lines with --data-path")
    if args.context_parallel_size > 1:
        lines.append(
            f"--context-parallel-size {args.context_parallel_size}: its ranks would each have parts of each "
            "packed sequence, which is not available under a schedule"
        )
    if args.objective not in (None, "causal_lm"):
        lines.append(f"--objective {args.objective}: conversations are for causal language models")
    if args.tokenizer_type != TOKENIZER:
        lines.append(
            f"--tokenizer-type {args.tokenizer_type}: conversations are read by {TOKENIZER}, with "
            "--tokenizer-model DIR, the folder that has the tokenizer of the model"
        )
    elif not args.tokenizer_model:
        lines.append("--tokenizer-model: name the folder that has the tokenizer of the model")
    else:
        lines += _format_conflicts(args.tokenizer_model, args.sft_tokenizer_prompt_format)
    return lines


def refuse_splits(args: argparse.Namespace) -> None:
    """Refuses files of data sets that Megatron ends at, with words that name no flag.

    Raises:
        ConfigError: there is a file for each split, and a split of one file; or a file of conversations of which
            the run takes none (``training/datasets/data_samplers.py:142``).
    """
    files = {f"--{split}-data-path": getattr(args, f"{split}_data_path") for split in ("train", "valid", "test")}
    given = [flag for flag, file in files.items() if file]
    if given and args.split is not None:
        raise ConfigError(
            f"--split {args.split} is of --data-path: leave it out, as there is {' and '.join(given)}"
        )
    unread = [flag for flag in given if flag != "--train-data-path"]
    if args.sft and unread and not args.eval_iters and not args.full_validation:
        what = "a file of conversations of which the run takes none ends it"
        raise ConfigError(
            f"{' and '.join(unread)} with --eval-iters 0: {what}; leave it out, or give --eval-iters 1"
        )


def default_sft_args(args: argparse.Namespace) -> None:
    """Turns off the attention mask of the data under ``--sft``, and prints ``unlearned_end``.

    Megatron's data set for ``--sft`` makes no mask, and ends the run where one is asked for, which is the default
    (``training/datasets/sft_dataset.py:174``).
    """
    if not args.sft:
        return
    args.create_attention_mask_in_dataloader = False
    notice = unlearned_end(args)
    if notice and args.rank == 0:
        print(f"megasched: {notice}")


def unlearned_end(args: argparse.Namespace) -> str:
    """Returns a notice where the model will not learn to end its answers; empty where it will.

    Megatron fills rows with the end token where the tokenizer has no padding token, and leaves the filling out of
    the loss (``training/datasets/sft_dataset.py:170``), and with it the end of each answer.
    """
    if not args.sft or args.sft_tokenizer_prompt_format != "default":
        return ""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer_model)
    if tokenizer.pad_token_id not in (None, tokenizer.eos_token_id):
        return ""
    return (
        f"the tokenizer in {args.tokenizer_model} has no padding token of its own, so rows are filled with "
        f"{tokenizer.eos_token}, which is then out of the loss everywhere: the model does not learn to end its "
        "answers. Name another token as pad_token in tokenizer_config.json"
    )


def _format_conflicts(folder: str, prompt_format: str) -> list[str]:
    """Returns why a tokenizer can't be used with one of Megatron's prompt formats; empty where it can."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        return [f"--tokenizer-model {folder}: {error}"]
    said = f"--sft-tokenizer-prompt-format {prompt_format}"
    if prompt_format == "default":
        if not tokenizer.chat_template:
            return [f"{said} is the tokenizer's own chat template, and {folder} has none (chat_template.jinja)"]
        if tokenizer.pad_token_id is None and tokenizer.eos_token_id is None:
            return [f"{said}: the tokenizer in {folder} has neither a padding nor an end token to fill rows with"]
        return []
    missing = [mark for mark in MARKS.get(prompt_format, ()) if mark not in tokenizer.get_vocab()]
    if prompt_format not in MARKS:
        return [f"{said}: Megatron has {', '.join(MARKS)} and default"]
    if missing:
        return [
            f"{said} writes {', '.join(missing)}, which the tokenizer in {folder} does not have; for a model with "
            "a chat template of its own say --sft-tokenizer-prompt-format default"
        ]
    return []
