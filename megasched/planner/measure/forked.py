"""Maps a function over several items on all cores.

Processes are forked: each has what was imported and opened so far, which to import and open again takes seconds.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch

# Each holds some 0.8 GB, half of it its own.
_MOST = 4
# What the processes of a pool do; a pool would send a function by its name, and this may be a closure.
_function: list[Callable[[Any], Any]] = []


def map_forked[Item, Result](function: Callable[[Item], Result], items: Sequence[Item]) -> Iterator[Result]:
    """Yields ``function`` of each item, in their order, and raises what it raises.

    Args:
        function: its results and errors can be pickled; changes that it makes are not seen in this process.
    """
    workers = min(len(os.sched_getaffinity(0)), len(items), _MOST)
    if workers > 1:
        fork = multiprocessing.get_context("fork")
        with ProcessPoolExecutor(workers, mp_context=fork, initializer=_begin, initargs=(function,)) as pool:
            if pool.submit(_goes_backward).result():
                yield from pool.map(_call, items)
                return
    yield from map(function, items)


def _goes_backward() -> bool:
    """Returns whether autograd works in a forked process: not after a backward that started device threads."""
    try:
        torch.ones(1, requires_grad=True).backward()
    except RuntimeError:
        return False
    return True


def _begin(function: Callable[[Any], Any]) -> None:
    gc.freeze()  # a collection would write to, and so copy, all that was forked
    gc.disable()  # it would take a sixth of the time
    torch.set_num_threads(1)  # OpenMP's threads were not forked, and it would wait for them
    # A live display of the first process may have been forked with its lock taken.
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
    _function[:] = [function]


def _call(item: Any) -> Any:
    try:
        return _function[0](item)
    finally:
        gc.collect()
