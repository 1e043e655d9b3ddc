"""Where reports are printed, and how quiet it is around them."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

# Columns of a report that goes to a file or a pipe.
PIPE_WIDTH = 100


def report_console() -> Console:
    """Standard output; in colours and at its own width when it is a terminal."""
    width = None if sys.stdout.isatty() or os.environ.get("COLUMNS") else PIPE_WIDTH
    return Console(highlight=False, width=width)


@contextmanager
def quiet_imports() -> Iterator[None]:
    """Megatron and torch say while they are imported which kernels they lack; ``megasched doctor`` says it."""
    logger = logging.getLogger("torch.utils.cpp_extension")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
