"""Imports large packages quickly and quietly."""

from __future__ import annotations

import gc
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import packages_distributions, version
from traceback import walk_tb
from typing import Any

from megasched.attributes import replaced
from megasched.collector import collector_paused
from megasched.errors import ConfigError

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


def end_quickly() -> None:
    """Has the interpreter end without looking through all that was imported: a second, where that is Megatron.

    A library made with nanobind, as Triton is from 3.9 on, calls what was not looked through leaked, in 25 lines
    after all others. Where there is one, the interpreter looks once, and not twice.
    """
    if any(metaclass.__module__ == "nanobind" for metaclass in type.__subclasses__(type)):
        gc.disable()
    else:
        gc.freeze()


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
def named_package() -> Iterator[None]:
    """Runs its body, which imports packages; says which of them can't be imported.

    Raises:
        ConfigError: an installed package raised an error as it was imported, such as one whose compiled code was
            made for another torch or another CUDA; Megatron passes over an ImportError alone.
    """
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        failed = _failed_package(error)
        if failed is None:
            raise
        raise ConfigError(
            f"{failed} can't be imported here: {type(error).__name__}: {error}. Install one that was made for the "
            "Python, torch and CUDA libraries that are installed, or uninstall it"
        ) from error


def _failed_package(error: Exception) -> str | None:
    """Returns name and version of the package whose import raised an error; None where it is ours, or unknown.

    Code that raises when it is called, and not as its module or one that needs it is imported, has no such name.
    """
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    packages = [str(frame.f_globals.get("__name__")).partition(".")[0] for frame in frames]
    importing = [name for name, frame in zip(packages, frames, strict=True) if frame.f_code.co_name == "<module>"]
    if all(name in (__package__, "__main__") for name in importing):
        return None
    others = [name for name in packages if name not in sys.stdlib_module_names]
    distributions = packages_distributions().get(others[-1], []) if others else []
    return f"{others[-1]} {version(distributions[0])}" if distributions and others[-1] != __package__ else None


@contextmanager
def uncompiled_imports() -> Iterator[None]:
    """Runs its body, in which ``torch.compile`` returns functions as they are.

    Megatron decorates functions with it, which imports torch's compiler (``torch._inductor``): a quarter of what
    Megatron's import takes.
    """
    import torch

    with replaced(torch, "compile", _uncompiled):
        yield


@contextmanager
def command_imports() -> Iterator[None]:
    """Runs its body, in which a command that runs no model on a GPU imports what it needs, quietly.

    Raises:
        ConfigError: see ``named_package``.
    """
    with collector_paused(), quiet_imports(), named_package(), uncompiled_imports():
        yield


def _uncompiled(model: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Stands in for ``torch.compile``, and for the decorator that it makes of options alone."""
    return (lambda function: function) if model is None else model
