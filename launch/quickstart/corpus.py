"""Builds a corpus that every machine has: the source of Python's standard library, as tokens one byte each."""

from __future__ import annotations

import hashlib
import json
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from megasched.errors import ConfigError
from megasched.files import named
from megasched.reading.files import Expected, read_bytes
from megasched.reading.json_file import read_json

EOD = 256
EOD_TOKEN = "<|endoftext|>"
VOCAB_SIZE = 257
COUNTS = Expected("the counts of a corpus; remove the folder, and it is made anew")
SOURCE = Expected("the source of a module of Python")

# Tests and vendored packages are no part of the library that people import.
SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


@dataclass(frozen=True)
class Corpus:
    """Represents a tokenized corpus in Megatron's indexed format.

    Attributes:
        folder: holds ``tokens.bin``, ``tokens.idx`` and ``corpus.json``.
        documents: number of files of which it was made.
        tokens: number of bytes in those files, plus one end-of-document token each.
    """

    folder: Path
    documents: int
    tokens: int

    @property
    def prefix(self) -> str:
        """Returns the path without ``.bin`` / ``.idx``, as Megatron's ``--data-path`` takes it."""
        return str(self.folder / "tokens")


def stdlib_folder() -> Path:
    """Returns the folder in which the running interpreter keeps the source of its standard library."""
    return Path(sysconfig.get_path("stdlib"))


def source_files(root: Path) -> list[Path]:
    """Returns the Python files under ``root`` without tests and installed packages, always in the same order.

    The order is that of a hash of each file's relative path: Megatron splits training from validation at a
    document number, and in alphabetical order validation would be the modules at the end of the alphabet.

    Raises:
        ConfigError: there is no Python source (an interpreter that ships compiled or zipped modules only).
    """
    found = [
        path
        for path in root.rglob("*.py")
        if path.is_file() and not SKIPPED_FOLDERS.intersection(path.relative_to(root).parts[:-1])
    ]
    if not found:
        raise ConfigError(
            f"{root} holds no Python source to train on; run the quickstart with a Python that ships its "
            "standard library as .py files (most do)"
        )
    return sorted(found, key=lambda path: hashlib.sha256(_relative_name(path, root)).digest())


def documents(root: Path) -> Iterator[bytes]:
    """Yields the content of each source file in order; files that are empty or not UTF-8 are left out."""
    for path in source_files(root):
        content = read_bytes(path, SOURCE)
        if content and _is_utf8(content):
            yield content


def prepare_corpus(folder: Path, root: Path | None = None) -> Corpus:
    """Tokenizes the source files into a folder below ``folder``, or finds that folder from an earlier run.

    The folder's name carries a hash of the files' names and sizes, so that another interpreter gets another
    corpus; it gets that name when it is complete, so that a broken run leaves nothing behind.

    Args:
        folder: where corpora lie; made if missing.
        root: folder of source files; the running interpreter's standard library by default.

    Returns:
        The corpus; token ids are byte values (0-255) and `EOD` (256), stored as uint16.

    Raises:
        ConfigError: there is no source to read.
    """
    root = root or stdlib_folder()
    home = folder / f"corpus-{_fingerprint(root)[:12]}"
    if not home.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        with named(home), TemporaryDirectory(dir=folder, prefix=f".{home.name}-") as unfinished:
            _write_corpus(Path(unfinished, "corpus"), root)
            Path(unfinished, "corpus").rename(home)
    counts = read_json(home / "corpus.json", COUNTS, {"documents": int, "tokens": int})
    return Corpus(folder=home, documents=counts["documents"], tokens=counts["tokens"])


def write_tokenizer(folder: Path) -> None:
    """Saves a Hugging Face tokenizer whose token ids are byte values, and `EOD` the end of a document.

    Megatron reads it by ``--tokenizer-type HuggingFaceTokenizer --tokenizer-model FOLDER``, transformers by
    ``AutoTokenizer.from_pretrained(FOLDER)``; neither needs a network.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # BPE without merges never joins two symbols, so one byte stays one token.
    tokenizer = Tokenizer(models.BPE(vocab=_byte_vocabulary(), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([EOD_TOKEN])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOD_TOKEN)
    wrapped.save_pretrained(folder)


def _write_corpus(folder: Path, root: Path) -> None:
    import numpy
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder, get_bin_path, get_idx_path

    folder.mkdir()
    prefix = str(folder / "tokens")
    builder = IndexedDatasetBuilder(get_bin_path(prefix), dtype=numpy.uint16)
    count = tokens = 0
    for content in documents(root):
        ids = numpy.empty(len(content) + 1, dtype=numpy.uint16)
        ids[:-1] = numpy.frombuffer(content, dtype=numpy.uint8)
        ids[-1] = EOD
        builder.add_document(ids, [len(ids)])
        count, tokens = count + 1, tokens + len(ids)
    builder.finalize(get_idx_path(prefix))
    (folder / "corpus.json").write_text(json.dumps({"documents": count, "tokens": tokens}) + "\n")


def _fingerprint(root: Path) -> str:
    digest = hashlib.sha256()
    for path in source_files(root):
        digest.update(_relative_name(path, root) + b"\0%d\0" % path.stat().st_size)
    return digest.hexdigest()


def _relative_name(path: Path, root: Path) -> bytes:
    return path.relative_to(root).as_posix().encode()


def _is_utf8(content: bytes) -> bool:
    try:
        content.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _byte_vocabulary() -> dict[str, int]:
    """Returns byte-level BPE's letter for each byte value -> that value.

    Its alphabet writes a printable byte as the character of that number and gives the others, in order,
    the characters from 256 on.
    """
    from tokenizers import pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet(), key=ord)
    printable = {ord(letter): letter for letter in alphabet if ord(letter) < 256}
    rest = iter(letter for letter in alphabet if ord(letter) >= 256)
    return {printable.get(value) or next(rest): value for value in range(256)}
