"""Imports large packages quickly and quietly."""

from __future__ import annotations

import gc
import logging
import os
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

# Warnings of no use to whoever starts a run begin so: a flag comes before the script's default, one process is
# rank 0, more is imported than used, Megatron asks for the gradient of what is not a leaf.
OF_NO_USE = (
    "Overriding default arguments for",
    "Could not determine rank from torch.distributed",
    "MimoModelConfig is experimental",
    "The .grad attribute of a Tensor that is not a leaf Tensor is being accessed",
)
# What is said while Megatron is imported: `megasched doctor` and the first lines of a run have that.
OF_KERNELS = (
    "Transformer Engine and Apex are not installed",
    "Apex is not installed",
    "Only transformer-engine>=",
    "absl.logging is not installed",
)


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


def quiet_run() -> None:
    """Drops the warnings that are of no use, in a run and the processes it spawns; Megatron's log stays as it is.

    To write a checkpoint Megatron spawns processes, which import it anew.
    """
    for words in OF_NO_USE:
        warnings.filterwarnings("ignore", re.escape(words))
    # What torch will rename is called by Megatron, or by torch itself.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.")
    ours = [f"ignore:{words}" for words in (*OF_NO_USE, *OF_KERNELS)]
    theirs = os.environ.get("PYTHONWARNINGS")
    # The later ones come first.
    os.environ["PYTHONWARNINGS"] = ",".join(ours if theirs is None else [*ours, theirs])


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


@contextmanager
def command_imports() -> Iterator[None]:
    """Runs its body, in which a command that runs no model on a GPU imports what it needs, quietly.

    Megatron decorates functions with ``torch.compile``, which imports torch's compiler (``torch._inductor``): a
    quarter of what Megatron's import takes. In the body it returns functions as they are.
    """
    import torch

    compile_ = torch.compile
    torch.compile = _uncompiled  # type: ignore[assignment]
    try:
        with without_collections(), quiet_imports():
            yield
    finally:
        torch.compile = compile_


def _uncompiled(model: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Stands in for ``torch.compile``, and for the decorator that it makes of options alone."""
    return (lambda function: function) if model is None else model
