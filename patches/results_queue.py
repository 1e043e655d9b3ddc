"""Starts the process that collects results from a checkpoint's writers at once, and ends it with its rank."""

from __future__ import annotations

import ctypes
import os
import pickle
import queue
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.managers import BaseProxy, SyncManager
from types import ModuleType
from typing import Any

from megasched.attributes import Undo, resolve, set_attribute
from megasched.patches.registry import Patch

_TARGET = "megatron.core.dist_checkpointing.strategies.filesystem_async:get_write_results_queue"
_QUEUE = "megatron.core.dist_checkpointing.strategies.filesystem_async:_results_queue"
_SET_PDEATHSIG = 1  # PR_SET_PDEATHSIG of linux/prctl.h


class ResultsQueue(BaseProxy):
    """Represents the queue in its ranks; the process that holds it sees bytes, and needs not import torch."""

    _exposed_ = ("put", "get", "get_nowait")

    def put(self, result: Any) -> None:
        """Puts a result in."""
        self._callmethod("put", (pickle.dumps(result),))

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """Takes a result out; raises ``queue.Empty`` as that of ``queue`` does."""
        return pickle.loads(self._callmethod("get", (block, timeout)))

    def get_nowait(self) -> Any:
        """Takes a result out that is there."""
        return pickle.loads(self._callmethod("get_nowait"))


class _Manager(SyncManager):
    """Starts the process of the queue."""


_Manager.register("Queue", queue.Queue, ResultsQueue)


def _change() -> Undo:
    def get_write_results_queue(mp_mode: str = "spawn") -> Any:
        results = resolve(_QUEUE)
        if results is None:
            manager: Any = _Manager(ctx=get_context(mp_mode))
            with _without_script():
                manager.start(end_with, (os.getpid(),))
            results = manager.Queue()
            set_attribute(_QUEUE, results)
        return results

    return set_attribute(_TARGET, get_write_results_queue)


@contextmanager
def _without_script() -> Iterator[None]:
    """Has a process that its body spawns begin without importing the script that runs, and Megatron with it."""
    script = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = script


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
        "and holds the rank's output open. The first save waits until it has imported the script and torch"
    ),
    change=_change,
    signature={_TARGET: ("mp_mode",)},
)
