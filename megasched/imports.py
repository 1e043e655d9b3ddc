"""Imports large packages quickly and quietly."""

from __future__ import annotations

import gc
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collections() -> Iterator[None]:
    """Runs its body, which imports packages, with the garbage collector off.

    Imported objects stay, and each collection scans all of them: together a tenth of a run's start.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def quiet_imports() -> Iterator[None]:
    """Runs its body without what Megatron and torch say of missing kernels; ``megasched doctor`` has that."""
    logger = logging.getLogger("torch.utils.cpp_extension")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
