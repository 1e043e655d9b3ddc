"""Shows the progress of transfers of bytes, and reads the next part while the last one is written."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from rich.filesize import decimal
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from megasched.printing.console import plain_console

# Between two lines in a log.
SECONDS = 10.0
# Results that wait to be taken, beside the one that is being made.
DEPTH = 2


@contextmanager
def transfer(title: str, total: int) -> Iterator[Callable[[int], Any]]:
    """Shows a transfer on standard error.

    Args:
        title: description of the transfer.
        total: bytes.

    Yields:
        A function that takes the number of further bytes that have been transferred.
    """
    if not sys.stderr.isatty():
        yield _Lines(title, total).advance
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=plain_console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=total)
        yield lambda count: bar.advance(task, count)


class _Lines:
    def __init__(self, title: str, total: int) -> None:
        self._title, self._total, self._done = title, total, 0
        self._start = self._told = time.monotonic()

    def advance(self, count: int) -> None:
        self._done += count
        now = time.monotonic()
        if now - self._told >= SECONDS or self._done == self._total > self._done - count:
            self._told = now
            rate = decimal(int(self._done / max(now - self._start, 1e-9)))
            done, total = decimal(self._done), decimal(self._total)
            share = f"{100 * self._done // self._total} %"
            print(f"megasched: {self._title}: {share}, {done} of {total}, {rate}/s", file=sys.stderr, flush=True)


def ahead[T](calls: Iterable[Callable[[], T]]) -> Iterator[T]:
    """Yields the results of the calls in their order; a thread runs the next calls while the caller works.

    An exception of a call is raised when its turn comes; later calls are not started then.
    """
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="ahead") as pool:
        waiting: deque[Future[T]] = deque()
        try:
            for call in calls:
                waiting.append(pool.submit(call))
                if len(waiting) > DEPTH:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
