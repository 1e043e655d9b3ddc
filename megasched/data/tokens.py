"""Writes text as tokens in Megatron's indexed format, which ``--data-path`` takes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from megasched.errors import ConfigError
from megasched.files import named
from megasched.reading.files import Expected, open_regular
from megasched.reading.forms import misfit
from megasched.reading.hf_source import check_hf_model
from megasched.reading.json_file import parse_field

TEXTS = Expected("JSON lines: an object on each, with the text of one document, or its sentences")
type Document = str | list[str]  # a text, or sentences
# Bytes of text that a tokenizer is given at once: enough for all of its threads, and little memory.
AT_ONCE = 8 << 20


@dataclass(frozen=True)
class Tokenized:
    """Represents a corpus that was written.

    Attributes:
        prefix: path without ``.bin`` and ``.idx``.
        tokenizer_model: of the run's flag of that name.
        documents: number of documents.
        sentences: number of sentences, where documents are lists of these.
        tokens: number of tokens, with one at the end of each document that is no list of sentences.
        empty: number of documents without text, which are left out.
    """

    prefix: str
    tokenizer_model: str
    documents: int
    sentences: int
    tokens: int
    empty: int

    @property
    def flags(self) -> tuple[str, ...]:
        """Returns the flags by which a run reads it."""
        model = ("--tokenizer-model", self.tokenizer_model)
        return ("--tokenizer-type", "HuggingFaceTokenizer", *model, "--data-path", self.prefix)


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

    A text ends with the tokenizer's end token, by which Megatron tells documents apart. Sentences have no tokens
    but those of their text: Megatron's data sets for BERT and T5 add theirs to each sample. Both files appear when
    they are whole.

    Args:
        files: JSON lines in UTF-8.
        prefix: path of the corpus without ``.bin`` and ``.idx``; its folder is made if missing.
        tokenizer_model: a folder that transformers' AutoTokenizer reads, or an id on the hub.
        key: field of an object that has the text, or a list of sentences: the same for all documents.
        force: replace a corpus of that name.
        progress: shows the transfer of a number of bytes; see ``transfer`` in ``weights/progress.py``.

    Raises:
        ConfigError: a file or a line is not of that form, there is no text at all, the corpus is there already, or
            the tokenizer has no end token.
    """
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    targets = _targets(prefix, force=force)
    check_hf_model(tokenizer_model, "--tokenizer-model")
    tokenizer, end = _tokenizer(tokenizer_model, trust_remote_code=trust_remote_code)
    prefix.parent.mkdir(parents=True, exist_ok=True)
    documents = sentences = tokens = empty = 0
    with named(prefix), TemporaryDirectory(dir=prefix.parent, prefix=f".{prefix.name}-") as folder:
        written = [Path(folder, target.name) for target in targets]
        builder = IndexedDatasetBuilder(str(written[0]), dtype=DType.optimal_dtype(len(tokenizer)))
        with progress(sum(file.stat().st_size for file in files)) as advance:
            for some in _batches(files, key, advance):
                whole = isinstance(some[0], str)
                for items in _ids(some, tokenizer, end):
                    if not items:
                        empty += 1
                        continue
                    ids = [*chain.from_iterable(items)]
                    builder.add_document(ids, [len(item) for item in items])
                    documents, tokens = documents + 1, tokens + len(ids)
                    sentences += 0 if whole else len(items)
        builder.finalize(str(written[1]))
        if not documents:
            raise ConfigError(f"{', '.join(map(str, files))}: no text in any line")
        targets[1].unlink(missing_ok=True)  # it says nothing of the tokens that come first
        for source, target in zip(written, targets, strict=True):
            os.replace(source, target)
    return Tokenized(str(prefix), tokenizer_model, documents, sentences, tokens, empty)


def _targets(prefix: Path, *, force: bool) -> list[Path]:
    if prefix.is_dir():
        raise ConfigError(f"--output {prefix}: it is a folder; name the corpus in it, e.g. {prefix / 'text'}")
    targets = [Path(f"{prefix}{suffix}") for suffix in (".bin", ".idx")]
    for target in targets:
        if os.path.lexists(target) and not force:
            raise ConfigError(f"{target}: it is there already; --force replaces it")
    return targets


def _ids(documents: Sequence[Document], tokenizer: Any, end: int) -> Iterator[list[list[int]]]:
    """Yields the ids of each document: of its text with an end token, or of its sentences; empty without text."""
    # A warning of texts longer than the model's positions says nothing here: Megatron cuts them into rows.
    options = {"return_attention_mask": False, "return_token_type_ids": False, "verbose": False}
    whole = isinstance(documents[0], str)
    items = [[*filter(None, [one] if isinstance(one, str) else one)] for one in documents]
    texts = [*chain.from_iterable(items)]
    ids = iter(tokenizer(texts, add_special_tokens=whole, **options)["input_ids"] if texts else ())
    for item in items:
        yield [[*one, end] if whole else one for one in islice(ids, len(item)) if whole or one]


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


def _batches(files: Sequence[Path], key: str, advance: Callable[[int], Any]) -> Iterator[list[Document]]:
    """Yields the documents of some lines, and tells of the bytes that these have.

    Raises:
        ConfigError: some are texts, and some lists of sentences.
    """
    documents: list[Document] = []
    size = 0
    first: type | None = None
    for file in files:
        with open_regular(file, TEXTS) as lines:
            for number, line in enumerate(lines, 1):
                size += len(line)
                if not line.isspace():
                    documents.append(_document(file, number, line, key))
                    first = first or type(documents[0])
                    if type(documents[-1]) is not first:
                        raise TEXTS.refusal(file, f"line {number}: {_UNLIKE[first]}")
                if size >= AT_ONCE and documents:
                    yield documents
                    advance(size)
                    documents, size = [], 0
    if documents:
        yield documents
    advance(size)


_UNLIKE = {
    str: "a list of sentences, where documents before it are texts",
    list: "a text, where documents before it are lists of sentences",
}


def _document(file: Path, number: int, line: bytes, key: str) -> Document:
    """Returns the document in one line, whose other fields may hold what they will.

    Raises:
        ConfigError: it is no JSON, or not of that form; names the line.
    """
    try:
        found = parse_field(line.decode(), key, str | list)
        if isinstance(found, list) and (why := misfit(found, [str], key)):
            raise ValueError(why)
    except ValueError as error:
        why = str(error).removeprefix("line 1, ")
        raise TEXTS.refusal(file, f"line {number}: {why}") from error
    document: Document = found
    return document
