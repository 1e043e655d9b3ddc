"""Waits for what happens, however long it takes: pytest-timeout ends what never does."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


def until(condition: Callable[[], object]) -> None:
    while not condition():
        time.sleep(0.02)


@contextmanager
def signalled(number: int, condition: Callable[[], object]) -> Iterator[None]:
    """This process gets a signal once a condition holds; none where the body has ended before."""
    over = threading.Event()

    def wait() -> None:
        while not over.wait(0.02):
            if condition():
                os.kill(os.getpid(), number)
                return

    thread = threading.Thread(target=wait)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
