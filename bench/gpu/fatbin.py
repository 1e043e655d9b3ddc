"""Leaves the machine code for one kind of GPU in a compiled library, which gets far smaller when it is compressed.

A library that nvcc has linked holds its kernels in containers: a header, then one entry for each kind of GPU. The
driver picks the entry for the GPU that is there. Entries for others are dropped, those kept move to the front of
their container, and zeros fill it up, so that no address in the library changes.
"""

from __future__ import annotations

import mmap
import struct
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

SECTIONS = (".nv_fatbin", "__nv_relfatbin")
MAGIC = 0xBA55ED50
# Of a container: magic, version, bytes of the header, bytes of what follows.
CONTAINER = struct.Struct("<IHHQ")
# Of an entry, its first fields: kind, unknown, bytes of the header, bytes of the payload, two fields, version, and
# the kind of GPU as a number, e.g. 90.
ENTRY = struct.Struct("<HHIQIIHHI")
PTX, MACHINE_CODE = 1, 2
KINDS = {PTX: "PTX", MACHINE_CODE: "sm"}


class Entry(NamedTuple):
    """Code for one kind of GPU: where it begins, header included, its bytes, and what it is for."""

    start: int
    size: int
    kind: int
    gpu: int


class FormatError(Exception):
    """The library holds something that this module doesn't know."""


def keep(library: Path, gpu: int) -> Counter[str]:
    """Drops all but the machine code for a kind of GPU, in place; returns what is kept, as ``contents`` does.

    Raises:
        FormatError: a container has no such code, or can't be read.
    """
    kept: Counter[str] = Counter()
    with library.open("r+b") as file, mmap.mmap(file.fileno(), 0) as held:
        for start, size in containers(held):
            header, first = _header(held, start)
            chosen = [one for one in entries(held, first, size) if (one.kind, one.gpu) == (MACHINE_CODE, gpu)]
            if not chosen:
                raise FormatError(f"{library}: a container has no machine code for sm_{gpu}")
            kept.update(_name(one) for one in chosen)
            code = b"".join(held[one.start : one.start + one.size] for one in chosen)
            held[first : first + size] = code + bytes(size - len(code))
            CONTAINER.pack_into(held, start, MAGIC, 1, header, len(code))
    return kept


def contents(library: Path) -> Counter[str]:
    """The entries of a library, counted by what they are, e.g. ``sm_90``."""
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as held:
        found = [one for start, size in containers(held) for one in entries(held, _header(held, start)[1], size)]
    return Counter(map(_name, found))


def containers(held: mmap.mmap) -> Iterator[tuple[int, int]]:
    """Where each container begins, and the bytes after its header."""
    for start, size in _sections(held):
        at = start
        while at + CONTAINER.size <= start + size:
            magic, _, header, length = CONTAINER.unpack_from(held, at)
            if magic != MAGIC:  # what fills up to the next one
                at += 8
                continue
            yield at, length
            at = (at + header + length + 7) & ~7


def entries(held: mmap.mmap, first: int, size: int) -> Iterator[Entry]:
    """The entries of a container.

    Args:
        first: where the first one begins.
        size: bytes of all of them.
    """
    at = first
    while at + ENTRY.size <= first + size:
        kind, _, header, payload, *_, gpu = ENTRY.unpack_from(held, at)
        if header < ENTRY.size or at + header + payload > first + size + 7:
            raise FormatError(f"an entry at {at:#x} is longer than its container")
        yield Entry(at, header + payload, kind, gpu)
        at += header + payload


def _header(held: mmap.mmap, start: int) -> tuple[int, int]:
    header: int = CONTAINER.unpack_from(held, start)[2]
    return header, start + header


def _name(entry: Entry) -> str:
    return f"{KINDS.get(entry.kind, f'kind {entry.kind}')}_{entry.gpu}"


def _sections(held: mmap.mmap) -> Iterator[tuple[int, int]]:
    """Where the sections with containers begin in an ELF file of 64 bits, and their bytes."""
    if held[:5] != b"\x7fELF\x02":
        raise FormatError("this is no ELF file of 64 bits")
    (table,) = struct.unpack_from("<Q", held, 0x28)
    width, count, names = struct.unpack_from("<HHH", held, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", held, table + number * width) for number in range(count)]
    for name, _, _, _, start, size in headers:
        place = headers[names][4] + name
        if held[place : held.find(b"\0", place)].decode() in SECTIONS:
            yield start, size
