"""Pauses Python's garbage collector where it would scan the same objects again and again."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Runs its body with the garbage collector off; objects without references are freed as ever.

    It is for code that makes many objects that all stay, and nothing large: a copy on meta, a run on meta. The
    collector would scan them again and again for nothing: a quarter of the time of a plan of 126 layers.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
