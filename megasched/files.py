"""Files that are there whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path


def write_whole(path: Path, pieces: Iterable[str]) -> None:
    """Writes text beside the file and renames it, so that nobody reads half of it.

    Args:
        path: its folder must exist; what is there is replaced.
        pieces: of the text, in order.

    Raises:
        OSError: it can't be written; nothing is left behind then.
    """
    handle, beside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.writelines(pieces)
        os.chmod(beside, 0o644)
        os.replace(beside, path)
    except BaseException:
        Path(beside).unlink(missing_ok=True)
        raise
