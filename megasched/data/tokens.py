"""Writes text as tokens in Megatron's indexed format, which ``--data-path`` takes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from megasched.errors import ConfigError
from megasched.reading.files import Expected, open_regular
from megasched.reading.hf_source import check_hf_model
from megasched.reading.json_file import parse_json

TEXTS = Expected("JSON lines: an object on each, with the text of one document")
# Bytes of text that a tokenizer is given at once: enough for all of its threads, and little memory.
AT_ONCE = 8 << 20


@dataclass(frozen=True)
class Tokenized:
    """Represents a corpus that was written.

    Attributes:
        prefix: path without ``.bin`` and ``.idx``.
        tokenizer_model: of the run's flag of that name.
        documents: number of documents.
        tokens: number of tokens, with one at the end of each document.
        empty: number of documents without text, which are left out.
    """

    prefix: str
    tokenizer_model: str
    documents: int
    tokens: int
    empty: int

    @property
    def flags(self) -> tuple[str, ...]:
        """Returns the flags by which a run reads it."""
        model = ("--tokenizer-model", self.tokenizer_model)
        return ("--tokenizer-type", "HuggingFaceTokenizer", *model, "--data-path", self.prefix)

    def to_dict(self) -> dict[str, Any]:
        """Returns the result as plain data for JSON."""
        return asdict(self)


def write_tokens(
    files: Sequence[Path],
    prefix: Path,
    tokenizer_model: str,
    *,
    key: str = "text",
    force: bool = False,
    trust_remote_code: bool = False,
    progress: Callable[[int], AbstractContextManager[Callable[[int], Any]]],
) -> Tokenized:
    """Writes the documents of JSON lines as tokens, as a run's ``--tokenizer-type HuggingFaceTokenizer`` would.

    Each document ends with the tokenizer's end token, by which Megatron tells documents apart. Both files appear
    when they are whole.

    Args:
        files: JSON lines in UTF-8.
        prefix: path of the corpus without ``.bin`` and ``.idx``; its folder is made if missing.
        tokenizer_model: a folder that transformers' AutoTokenizer reads, or an id on the hub.
        key: field of an object that has the text.
        force: replace a corpus of that name.
        progress: shows the transfer of a number of bytes; see ``transfer`` in ``weights/progress.py``.

    Raises:
        ConfigError: a file or a line is not of that form, there is no text at all, the corpus is there already, or
            the tokenizer has no end token.
    """
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    targets = [Path(f"{prefix}{suffix}") for suffix in (".bin", ".idx")]
    for target in targets:
        if os.path.lexists(target) and not force:
            raise ConfigError(f"{target}: it is there already; --force replaces it")
    check_hf_model(tokenizer_model, "--tokenizer-model")
    tokenizer, end = _tokenizer(tokenizer_model, trust_remote_code=trust_remote_code)
    prefix.parent.mkdir(parents=True, exist_ok=True)
    documents = tokens = empty = 0
    with TemporaryDirectory(dir=prefix.parent, prefix=f".{prefix.name}-") as folder:
        written = [Path(folder, target.name) for target in targets]
        builder = IndexedDatasetBuilder(str(written[0]), dtype=DType.optimal_dtype(len(tokenizer)))
        with progress(sum(file.stat().st_size for file in files)) as advance:
            for ids, left_out in _documents(files, key, tokenizer, advance):
                empty += left_out
                for one in ids:
                    builder.add_document([*one, end], [len(one) + 1])
                    documents, tokens = documents + 1, tokens + len(one) + 1
        builder.finalize(str(written[1]))
        if not documents:
            raise ConfigError(f"{', '.join(map(str, files))}: no text in any line")
        for source, target in zip(written, targets, strict=True):
            os.replace(source, target)
    return Tokenized(str(prefix), tokenizer_model, documents, tokens, empty)


def _documents(
    files: Sequence[Path], key: str, tokenizer: Any, advance: Callable[[int], Any]
) -> Iterator[tuple[list[list[int]], int]]:
    """Yields the ids of some documents, and how many beside them have no text."""
    # A warning of texts longer than the model's positions says nothing here: Megatron cuts them into rows.
    options = {"return_attention_mask": False, "return_token_type_ids": False, "verbose": False}
    for texts, size in _batches(files, key):
        some = list(filter(None, texts))
        yield tokenizer(some, **options)["input_ids"] if some else [], len(texts) - len(some)
        advance(size)


def _tokenizer(name: str, *, trust_remote_code: bool) -> tuple[Any, int]:
    """Returns a tokenizer and the id that Megatron takes for the end of a document.

    See ``megatron/core/tokenizers/text/libraries/huggingface_tokenizer.py``: ``sep`` stands in for a missing
    ``eos``.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--tokenizer-model {name}: no tokenizer: {str(error).partition('\n')[0]}") from error
    end = tokenizer.sep_token_id if tokenizer.eos_token_id is None else tokenizer.eos_token_id
    if end is None:
        raise ConfigError(
            f"--tokenizer-model {name}: it has no end token, by which documents are told apart; name one as "
            "`eos_token` in its tokenizer_config.json"
        )
    return tokenizer, end


def _batches(files: Sequence[Path], key: str) -> Iterator[tuple[list[str], int]]:
    """Yields the texts of some lines, and the bytes that these lines have."""
    texts: list[str] = []
    size = 0
    for file in files:
        with open_regular(file, TEXTS) as lines:
            for number, line in enumerate(lines, 1):
                size += len(line)
                if not line.isspace():
                    texts.append(_text(file, number, line, key))
                if size >= AT_ONCE:
                    yield texts, size
                    texts, size = [], 0
    yield texts, size


def _text(file: Path, number: int, line: bytes, key: str) -> str:
    """Returns the text in one line.

    Raises:
        ConfigError: it is no JSON, or not of that form; names the line.
    """
    try:
        found: str = parse_json(line.decode(), {key: str})[key]
    except ValueError as error:
        why = str(error).removeprefix("line 1, ")
        raise TEXTS.refusal(file, f"line {number}: {why}") from error
    return found
