"""Megatron's own trainer on a ghost GPU; each rank writes what its steps ask.

    python -m tests.ghost.trainer_case FOLDER SCRIPT.py FLAGS

Where the flags name a schedule it trains under megasched, else Megatron's own model, by a script that megasched
brings. ``FOLDER/events.RANK`` has a ``mark:step`` where a step begins and a ``mark:end`` after it.
"""

from __future__ import annotations

import ctypes
import functools
import os
import runpy
import sys
from typing import Any
from unittest import mock

from megasched import patches
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
    """Trains, and writes the events of this rank."""
    GHOST.ghost_start()
    if "--model-schedule" in flags:
        _scheduled(script, flags)
    else:
        patches.apply("wheel_helpers")  # the wheel has no Makefile, and the trainer would call make
        mark_steps()
        sys.argv = [script, *flags]
        runpy.run_path(str(entry.bundled_script(script)), run_name="__main__")
    GHOST.ghost_write(os.path.join(folder, f"events.{os.environ.get('RANK', '0')}").encode())


def _scheduled(script: str, flags: list[str]) -> None:
    run_path = entry.runpy.run_path

    def marked(*args: Any, **kwargs: Any) -> Any:  # by then all of megasched's patches are in place
        mark_steps()
        return run_path(*args, **kwargs)

    with mock.patch.object(entry.runpy, "run_path", marked):
        entry.run_script(script, flags)


if __name__ == "__main__":
    run(sys.argv[1], sys.argv[2], sys.argv[3:])
