"""Starts the process that collects results from a checkpoint's writers at once, and ends it with its rank.

The process of ``--use-persistent-ckpt-worker`` ends with its rank, too, and errors of writers name their file.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import queue
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from multiprocessing import get_context, parent_process
from multiprocessing.managers import BaseProxy, SyncManager
from threading import Thread
from types import ModuleType
from typing import Any

from megasched.attributes import Undo, resolve, set_attribute
from megasched.patches.registry import Patch

_TARGET = "megatron.core.dist_checkpointing.strategies.filesystem_async:get_write_results_queue"
_QUEUE = "megatron.core.dist_checkpointing.strategies.filesystem_async:_results_queue"
_WRITER = "megatron.core.dist_checkpointing.strategies.filesystem_async:FileSystemWriterAsync.write_preloaded_data"
_LOOP = "megatron.core.dist_checkpointing.strategies.async_utils:PersistentAsyncCaller.async_loop"
# Megatron's own loop, in a process that has the patch: a rank, or one that it has forked.
_loops: list[Callable[..., None]] = []
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


def _change() -> list[Undo]:
    def get_write_results_queue(mp_mode: str = "spawn") -> Any:
        results = resolve(_QUEUE)
        if results is None:
            manager: Any = _Manager(ctx=get_context(mp_mode))
            with _without_script():
                manager.start(end_with, (os.getpid(),))
            results = manager.Queue()
            set_attribute(_QUEUE, results)
        return results

    _loops.append(resolve(_LOOP))
    return [
        _loops.clear,
        set_attribute(_TARGET, get_write_results_queue),
        set_attribute(_LOOP, staticmethod(save_while_rank_lives)),
        _name_files(),
    ]


def _name_files() -> Undo:
    return set_attribute(_WRITER, staticmethod(_file_named(resolve(_WRITER))))


def save_while_rank_lives(*given: Any) -> None:
    """Runs the loop of the process that saves, and ends the process with the rank that has started it.

    Neither that rank's error nor Python's end would: it is told to end where Python ends in good order.
    """
    Thread(target=_end_with_rank, daemon=True).start()
    if not _loops:  # a process that was not forked has no patches
        _name_files()
    (_loops[-1] if _loops else resolve(_LOOP))(*given)


def _end_with_rank() -> None:
    rank = parent_process()
    if rank is not None:
        rank.join()
        os._exit(1)


def _file_named(write_file: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps the writing of a file so that its errors name the file, as errors of opening do."""

    @wraps(write_file)
    def file_named(
        transforms: Any, local_proc_idx: int, write_bucket: Any, results_queue: Any, *given: Any, **named: Any
    ) -> Any:
        found = write_file(transforms, local_proc_idx, write_bucket, results_queue, *given, **named)
        if isinstance(found[1], OSError):
            found[1].filename = str(write_bucket[0])
            # Megatron keeps of what is returned the type alone, of what is raised the text.
            if results_queue is None:
                raise found[1]
        return found

    return file_named


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
    targets=(_TARGET, _QUEUE, _LOOP, _WRITER),
    why=(
        "megatron/core/dist_checkpointing/strategies/filesystem_async.py:65 starts a process that is told to end "
        "when Python ends in good order; after kill -9, or an error that ends a rank at once, it stays for ever, "
        "and holds the rank's output open. The first save waits until it has imported the script and torch. "
        "So does the process of async_utils.py:350. Of an error while a file is written filesystem_async.py:291 "
        "tells the type alone"
    ),
    change=_change,
    signature={_TARGET: ("mp_mode",)},
)
