"""Reads files that somebody else has written, if they are regular files of a size and an encoding that
suit.

Whatever lies at a path may be no file at all: to open a FIFO waits for ever, to read a device never ends.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import BinaryIO

from megasched.errors import ConfigError, MegaschedError

MIB = 1 << 20
BOM = b"\xef\xbb\xbf"
_IRREGULAR = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


@dataclass(frozen=True)
class Expected:
    """Says what a file is to be.

    Attributes:
        what: in words, behind "expected", e.g. ``"a certificate, which `megasched verify` writes"``.
        error: that is raised if it is something else.
        flag: that named the file, e.g. ``--gpu``; stands before its path in messages.
        most: bytes that such a file has.
    """

    what: str
    error: type[MegaschedError] = ConfigError
    flag: str = ""
    most: int = 64 * MIB

    def named_by(self, flag: str) -> Expected:
        """Says the same of a file that a flag has named."""
        return replace(self, flag=flag)

    def refusal(self, path: str | os.PathLike[str], why: str) -> MegaschedError:
        """Makes the error: file, why and where, and what was expected."""
        name = f"{self.flag} {os.fspath(path)}".strip()
        return self.error(f"{printable(name)}: {printable(why)}; expected {self.what}")


def printable(text: str) -> str:
    """Escapes what UTF-8 has no bytes for, and NUL, so that any terminal and any file takes the text."""
    return text.encode("utf-8", "backslashreplace").decode().replace("\0", "\\x00")


def is_regular(path: str | os.PathLike[str]) -> bool:
    """Says whether there is a regular file; a name that no file can have is none, too."""
    return os.path.isfile(path)


@contextmanager
def open_regular(path: str | os.PathLike[str], expected: Expected, about: str = "") -> Iterator[BinaryIO]:
    """Opens a regular file for its bytes; it never waits for one who writes.

    Args:
        about: what is read, for messages; the path, if not given.

    Raises:
        MegaschedError: ``expected.error``: there is no such file, it is no regular one, or can't be read.
    """
    handle = -1
    try:
        found = os.stat(path)
        if stat.S_ISREG(found.st_mode):
            handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            found = os.fstat(handle)  # another file may have come there
        if not stat.S_ISREG(found.st_mode):
            it = next((name for test, name in _IRREGULAR if test(found.st_mode)), "no regular file")
            raise expected.refusal(about or path, f"it is {it}, no regular file")
        with os.fdopen(handle, "rb", closefd=False) as file:
            yield file
    except OSError as error:
        raise expected.refusal(about or path, error.strerror or str(error)) from error
    except ValueError as error:  # of os.stat: a NUL in the path
        if handle >= 0:
            raise
        raise expected.refusal(about or path, f"no file has such a name ({error})") from error
    finally:
        if handle >= 0:
            os.close(handle)


def read_bytes(path: str | os.PathLike[str], expected: Expected) -> bytes:
    """Reads the whole of a file.

    Raises:
        MegaschedError: ``expected.error``: it can't be read, or is larger than such a file is.
    """
    with open_regular(path, expected) as file:
        found = bytearray()
        while len(found) <= expected.most and (piece := file.read(MIB)):
            found += piece
    if len(found) > expected.most:
        raise expected.refusal(path, f"it has more than {expected.most} bytes, too many for such a file")
    return bytes(found)


def read_text(path: str | os.PathLike[str], expected: Expected) -> str:
    """Reads the whole of a text file in UTF-8.

    Raises:
        MegaschedError: ``expected.error``: it can't be read, or is in another encoding; names the line.
    """
    found = read_bytes(path, expected)
    if found.startswith(BOM):
        raise expected.refusal(path, "line 1: it begins with a byte order mark (BOM); save it as UTF-8 without")
    try:
        return found.decode()
    except UnicodeDecodeError as error:
        line = 1 + found.count(b"\n", 0, error.start)
        why = f"line {line}: byte {error.start} is {found[error.start]:#04x}, which is not UTF-8"
        raise expected.refusal(path, why) from error
