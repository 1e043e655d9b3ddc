"""Reads the index of a data set as Megatron keeps it (``PREFIX.idx``, megatron/core/datasets/indexed_dataset.py).

Megatron maps the file and takes it at its word: counts that are too large are read past its end, lengths and
places that are wrong give tokens of other documents.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO

from megasched.reading.files import Expected, open_regular

if TYPE_CHECKING:
    import numpy

IDX = Expected("an index of a data set, as Megatron's tools/preprocess_data.py writes it beside a .bin file")
TOKENS = Expected("the tokens of a data set")
MAGIC = b"MMIDIDX\0\0"
HEAD = struct.Struct("<9sQBQQ")
DTYPES = ("", "uint8", "int8", "int16", "int32", "int64", "float64", "float32", "uint16")
# Sequences that are looked at in one go.
_MANY = 1 << 22


@dataclass(frozen=True)
class Idx:
    """Holds what an index says.

    Attributes:
        dtype: numpy's name, of the tokens.
        sequences: how many.
        documents: where each begins, counted in sequences, and the end of the last: int64 [documents + 1].
        lengths: of the sequences, in tokens: int32 [sequences].
        pointers: where each begins in the .bin file, in bytes: int64 [sequences].
    """

    dtype: str
    sequences: int
    documents: numpy.ndarray
    lengths: numpy.ndarray
    pointers: numpy.ndarray

    def document_at(self, byte: int) -> int:
        """Returns the number, from 0, of the document that a byte of the .bin file belongs to."""
        import numpy

        holds = (self.pointers <= byte) & (byte < self.pointers + self.lengths * numpy.dtype(self.dtype).itemsize)
        sequence = int(holds.argmax())
        return int(numpy.searchsorted(self.documents, sequence, side="right")) - 1


def read_idx(path: str | os.PathLike[str], bin_size: int, expected: Expected = IDX) -> Idx:
    """Reads an index, and checks it against itself and against the size of the .bin file, in bytes; its arrays are
    mapped.

    Raises:
        MegaschedError: ``expected.error``, with the field that is wrong.
    """
    with open_regular(path, expected) as file:
        return _read(path, file, bin_size, expected)


def map_tokens(path: str | os.PathLike[str], idx: Idx, count: int) -> numpy.ndarray:
    """Maps the first ``count`` tokens of the .bin file, [count] of the index's dtype.

    Raises:
        MegaschedError: there is no such file, or it is no regular one.
    """
    import numpy

    with open_regular(path, TOKENS):
        return numpy.memmap(path, dtype=numpy.dtype(idx.dtype).newbyteorder("<"), mode="r", shape=(count,))


def _read(path: Any, file: BinaryIO, bin_size: int, expected: Expected) -> Idx:
    import numpy

    head, size = file.read(HEAD.size), os.fstat(file.fileno()).st_size
    if len(head) < HEAD.size or not head.startswith(MAGIC):
        raise expected.refusal(path, f"it begins with {head[:9]!r}, {MAGIC!r} is due")
    _, version, code, sequences, documents = HEAD.unpack(head)
    if version != 1:
        raise expected.refusal(path, f"version {version}, 1 is due")
    if not 0 < code < len(DTYPES):
        raise expected.refusal(
            path, f"the dtype of tokens has code {code}, one from 1 to {len(DTYPES) - 1} is due"
        )
    end = HEAD.size + 12 * sequences + 8 * documents
    if size not in (end, end + sequences):  # with a mode for each sequence, of multimodal data
        why = f"{sequences} sequences and {documents} ends of documents take {end} bytes, the file has {size}"
        raise expected.refusal(path, why)

    def mapped(offset: int, dtype: str, count: int) -> numpy.ndarray:
        if not count:
            return numpy.empty(0, dtype)
        return numpy.memmap(path, dtype=dtype, mode="r", offset=offset, shape=(count,))

    lengths = mapped(HEAD.size, "<i4", sequences)
    pointers = mapped(HEAD.size + 4 * sequences, "<i8", sequences)
    ends = mapped(HEAD.size + 12 * sequences, "<i8", documents)
    found = Idx(DTYPES[code], sequences, ends, lengths, pointers)
    if why := _wrong(found, bin_size):
        raise expected.refusal(path, why)
    return found


def _wrong(idx: Idx, bin_size: int) -> str:
    """Names the first sequence or document whose place can't be right."""
    import numpy

    itemsize = numpy.dtype(idx.dtype).itemsize
    for start in range(0, idx.sequences, _MANY):
        lengths = idx.lengths[start : start + _MANY].astype(numpy.int64)
        pointers = numpy.asarray(idx.pointers[start : start + _MANY])
        bad = (
            (lengths < 0)
            | (pointers < 0)
            | (pointers > bin_size - lengths * itemsize)
            | (pointers % itemsize != 0)
        )
        if bad.any():
            at = int(bad.argmax())
            what = f"sequence {start + at}: {lengths[at]} tokens of {itemsize} bytes at byte {pointers[at]}"
            return f"{what}; the .bin file has {bin_size} bytes"
    ends = numpy.asarray(idx.documents)
    if not len(ends) or ends[0] != 0 or ends[-1] != idx.sequences:
        return f"the documents do not span the {idx.sequences} sequences: {ends[:1]} to {ends[-1:]}"
    falls = numpy.flatnonzero(numpy.diff(ends) < 0)
    return f"document {int(falls[0])} ends before it begins" if len(falls) else ""
