"""Reads Megatron's tracker in a ``--save`` folder, which says which checkpoint is the last."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from megasched.errors import CheckpointError
from megasched.reading.files import Expected, read_text

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"
# Digits of an iteration; Megatron makes an int of them.
_LONGEST = 18


def has_tracker(save: str | Path) -> bool:
    """Says whether anything was saved to a folder; a tracker that is no regular file counts, too."""
    return (Path(save) / TRACKER).exists()


def read_tracker(save: str | Path) -> str:
    """Reads the digits of the last iteration, or `RELEASE`.

    Raises:
        CheckpointError: there is no tracker, it can't be read, or it says something else.
    """
    path = Path(save) / TRACKER
    expected = Expected(f"an iteration or `{RELEASE}`", CheckpointError, most=1024)
    said = read_text(path, expected).strip()
    if said != RELEASE and not (said.isascii() and said.isdigit() and len(said) <= _LONGEST):
        raise expected.refusal(path, f"found {said[:40]!r}")
    return said


def last_saved(save: str | Path | None, warn: Callable[[str], None]) -> str:
    """Returns what the tracker of a run names; empty without one, or, after a warning, where it can't be read."""
    try:
        return read_tracker(save) if save is not None and has_tracker(save) else ""
    except CheckpointError as error:
        warn(f"warning: {error}")
        return ""


def last_folder(save: str | Path) -> Path:
    """Names the folder of the checkpoint that the tracker names.

    Raises:
        CheckpointError: as ``read_tracker``.
    """
    said = read_tracker(save)
    return Path(save) / (RELEASE if said == RELEASE else f"iter_{int(said):07d}")
