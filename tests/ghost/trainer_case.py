"""Megatron's own trainer under megasched on a ghost GPU; each rank writes what its steps ask.

    python -m tests.ghost.trainer_case FOLDER SCRIPT.py FLAGS

``FOLDER/events.RANK`` has a ``mark:step`` where a step begins and a ``mark:end`` after it.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from typing import Any
from unittest import mock

from megasched.trainer import entry

GHOST = ctypes.CDLL(None)


def mark_steps() -> None:
    """Has Megatron's trainer say where a step begins and ends."""
    from megatron.training import training

    train_step = training.train_step
    if hasattr(train_step, "marked"):
        return

    @functools.wraps(train_step)
    def marked(*args: Any, **kwargs: Any) -> Any:
        GHOST.ghost_mark(b"step")
        made = train_step(*args, **kwargs)
        GHOST.ghost_mark(b"end")
        return made

    marked.marked = True  # type: ignore[attr-defined]
    training.train_step = marked


def run(folder: str, script: str, flags: list[str]) -> None:
    run_path = entry.runpy.run_path

    def marked(*args: Any, **kwargs: Any) -> Any:  # by then all of megasched's patches are in place
        mark_steps()
        return run_path(*args, **kwargs)

    GHOST.ghost_start()
    with mock.patch.object(entry.runpy, "run_path", marked):
        entry.run_script(script, flags)
    GHOST.ghost_write(os.path.join(folder, f"events.{os.environ.get('RANK', '0')}").encode())


if __name__ == "__main__":
    run(sys.argv[1], sys.argv[2], sys.argv[3:])
