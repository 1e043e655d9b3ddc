"""Defines the command ``megasched tokenize``."""

from __future__ import annotations

import shlex
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from megasched.cli.options import Json, TrustRemoteCode
from megasched.cli.output import print_found
from megasched.data.tokens import Tokenized, write_tokens
from megasched.imports import quiet_imports
from megasched.json_output import json_only
from megasched.weights.progress import transfer


def tokenize(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="JSON lines, a document on each.")],
    tokenizer_model: Annotated[
        str, typer.Option(metavar="DIR", help="The tokenizer: a Hugging Face folder, the model's as a rule.")
    ],
    output: Annotated[Path, typer.Option(metavar="PREFIX", help="Write PREFIX.bin and PREFIX.idx.")],
    key: Annotated[str, typer.Option(metavar="NAME", help="The field that has the text, or sentences.")] = "text",
    force: Annotated[bool, typer.Option("--force", help="Replace a corpus of that name.")] = False,
    trust_remote_code: TrustRemoteCode = False,
    as_json: Json = False,
) -> None:
    """Make a corpus of text, in Megatron's indexed format: a run's --data-path PREFIX.

    The tokens are those of --tokenizer-type HuggingFaceTokenizer, with an end token behind each document. For BERT
    and T5 a document is a list of sentences, to which their data sets add such tokens. A fast tokenizer takes all
    cores. PREFIX.idx appears last, when both are whole.
    """
    with quiet_imports(), json_only(as_json):
        found = write_tokens(
            files,
            output,
            tokenizer_model,
            key=key,
            force=force,
            trust_remote_code=trust_remote_code,
            progress=partial(transfer, "tokenizing"),
        )
    print_found(found, print_tokenized, as_json=as_json)


def print_tokenized(found: Tokenized, console: Console) -> None:
    """Prints what was written, and the flags by which a run reads it."""
    left = f"; {found.empty:,} without text left out" if found.empty else ""
    sentences = f"{found.sentences:,} sentences, " if found.sentences else ""
    console.print(f"{found.prefix}: {found.documents:,} documents, {sentences}{found.tokens:,} tokens{left}")
    console.print(f"a run reads it with {shlex.join(found.flags)}", soft_wrap=True)
