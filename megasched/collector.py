"""Python's collector of garbage, kept from looking at the same objects again and again."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """In which nothing is collected; what is no longer referred to is freed as ever.

    For what makes many objects that all stay, and nothing large: a copy on meta, a run on meta. The collector
    would look at them again and again for nothing, which took a quarter of the time of a plan of 126 layers.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
