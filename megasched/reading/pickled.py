"""Reads pickles that somebody else has written; what they may name is the caller's affair
(`weights/torch_dist/unpickling.py`)."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from typing import Any, BinaryIO

from megasched.errors import MegaschedError
from megasched.reading.files import Expected, open_regular

# Python's own: the one in C makes room for as many entries as a damaged index into its memo says, 64 GB of them.
Unpickler: Any = pickle._Unpickler  # type: ignore[attr-defined]
Load = Callable[[BinaryIO], Any]


def read_pickled(path: str | os.PathLike[str], expected: Expected, load: Load, part: str = "") -> Any:
    """Returns what ``load`` makes of a file of pickles, or of a file with some in it.

    Args:
        load: of the open file.
        part: of the file, for messages.

    Raises:
        MegaschedError: ``expected.error``: whatever goes wrong in a pickle that is damaged.
    """
    about = f"{path}, {part}" if part else str(path)
    with open_regular(path, expected, about) as file:
        try:
            return load(file)
        except MegaschedError as error:
            raise expected.error(f"{about}: {error}") from error
        except Exception as error:  # each object of a pickle raises in its own way
            why = f"{type(error).__name__}: {error}".rstrip(": ")
            raise expected.refusal(about, f"can't be read: {why:.300}") from error
