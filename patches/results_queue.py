"""Ends the process that collects results from a checkpoint's writers with its rank, however that ends."""

from __future__ import annotations

import ctypes
import os
import signal
from typing import Any

from megasched.attributes import Undo, resolve, set_attribute
from megasched.patches.registry import Patch

_TARGET = "megatron.core.dist_checkpointing.strategies.filesystem_async:get_write_results_queue"
_QUEUE = "megatron.core.dist_checkpointing.strategies.filesystem_async:_results_queue"
_SET_PDEATHSIG = 1  # PR_SET_PDEATHSIG of linux/prctl.h


def _change() -> Undo:
    def get_write_results_queue(mp_mode: str = "spawn") -> Any:
        from multiprocessing import get_context
        from multiprocessing.managers import SyncManager

        queue = resolve(_QUEUE)
        if queue is None:
            manager = SyncManager(ctx=get_context(mp_mode))
            manager.start(end_with, (os.getpid(),))
            queue = manager.Queue()
            set_attribute(_QUEUE, queue)
        return queue

    return set_attribute(_TARGET, get_write_results_queue)


def end_with(parent: int) -> None:
    """Makes the kernel kill this child process when its parent is gone."""
    ctypes.CDLL(None).prctl(_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it was gone before
        os._exit(1)


PATCH = Patch(
    name="results_queue",
    targets=(_TARGET, _QUEUE),
    why=(
        "megatron/core/dist_checkpointing/strategies/filesystem_async.py:65 starts a process that is told to end "
        "when Python ends in good order; after kill -9, or an error that ends a rank at once, it stays for ever, "
        "and holds the rank's output open"
    ),
    change=_change,
    signature={_TARGET: ("mp_mode",)},
)
