"""Writes files and folders so that they are there whole or not at all."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from megasched.errors import ConfigError

# An error of a write has no file's name, as that of an open has.
NO_ROOM = frozenset([errno.ENOSPC, errno.EDQUOT, errno.EFBIG])


@contextmanager
def named(path: Path) -> Iterator[None]:
    """Gives an OSError of the body the name of this file where it names none, or a temporary one beside it."""
    hidden = os.path.join(path.absolute().parent, f".{path.name}")
    try:
        yield
    except OSError as error:
        unnamed = error.filename is None or os.path.abspath(error.filename).startswith(hidden)
        if unnamed and error.errno is not None:  # one without a number has a text of its own
            error.filename, error.filename2 = str(path), None
        raise


def write_whole(path: Path, pieces: Iterable[str], *, replace: bool = True) -> None:
    """Writes text to a file beside ``path`` and renames it, so that nobody reads half of it.

    Args:
        path: its folder must exist.
        pieces: pieces of the text, in order.
        replace: an existing file is replaced.

    Raises:
        OSError: it can't be written, or may not replace what is there; nothing is left behind then.
    """
    beside = path.with_name(f".{path.name}{secrets.token_hex(4)}")
    with named(path):
        file = beside.open("x", encoding="utf-8")  # to be read by whom the umask lets read
        try:
            with file:
                file.writelines(pieces)
            if replace:
                os.replace(beside, path)
            else:
                os.link(beside, path)  # fails, where a rename would replace
        finally:
            beside.unlink(missing_ok=True)


def check_writable(flag: str, path: str | Path | None) -> None:
    """Checks that the file that a flag names, if it is given, can be written, before what it takes is worked out.

    Raises:
        ConfigError: it is a folder, or there is no folder for it that can be written to.
    """
    if path is None:
        return
    file = Path(path)
    if file.is_dir():
        raise ConfigError(f"{flag} {path}: it is a folder; the name of a file is due")
    if not file.parent.is_dir() or not os.access(file.parent, os.W_OK):
        raise ConfigError(f"{flag} {path}: there is no folder {file.parent} that can be written to")


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Runs its body with a folder beside ``path``, which becomes ``path`` on success and is removed on an error.

    Args:
        path: if it is a link, the folder that it names becomes the new one.

    Raises:
        ConfigError: there is something at ``path`` already, or it can't be written, now or later.
    """
    path = Path(os.path.realpath(path))  # which a rename can replace: neither a link nor `.`
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ConfigError(f"{path}: there is something already; name a folder that is empty or does not exist")
    if os.path.ismount(path):
        raise ConfigError(
            f"{path}: a file system is mounted there, which nothing can replace; name a folder in it"
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
        beside.mkdir()  # to be read by whom the umask lets read
    except OSError as error:
        raise ConfigError(f"{path}: can't be written: {error}") from error
    try:
        yield beside
        os.replace(beside, path)
    except BaseException as error:
        shutil.rmtree(beside, ignore_errors=True)
        if isinstance(error, OSError | SafetensorError):
            raise ConfigError(f"{path}: can't be written: {error}") from error
        raise


def check_room(folder: Path, needed: int) -> None:
    """Raises ConfigError when ``needed`` bytes do not fit the file system of ``folder``."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ConfigError(f"{folder.parent}: {needed / 1e9:.2f} GB are needed, {free / 1e9:.2f} GB are free")
