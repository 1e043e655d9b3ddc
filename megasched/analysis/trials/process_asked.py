"""Refuses code that asks for its process: plain HF is one process, and a run's ranks get other answers."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from megasched.errors import Problem, ScheduleError

_DISTRIBUTED = str(Path(torch.distributed.__file__).parent) + os.sep
_READS_ENVIRONMENT = os.environ.__getitem__.__func__.__code__  # type: ignore[attr-defined]
_OF_RANKS = frozenset(["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "SLURM_PROCID", "SLURM_LOCALID"])
_OTHERS = frozenset(["torch", "transformers", "megatron", "megasched"])


@contextmanager
def process_not_asked() -> Iterator[None]:
    """Runs its body, in which a definition may not call ``torch.distributed`` or read a rank's variables.

    Raises:
        ScheduleError: it does so.
    """
    before = sys.getprofile()
    sys.setprofile(_refuse)
    try:
        yield
    finally:
        sys.setprofile(before)


def _refuse(frame: FrameType, event: str, arg: Any) -> None:
    if event != "call" or frame.f_code.co_name == "<module>":  # a module that is imported asks nothing
        return
    code, asked, caller = frame.f_code, "", frame.f_back
    if code.co_filename.startswith(_DISTRIBUTED) and code.co_name != "is_available":
        asked = "torch.distributed"
    elif code is _READS_ENVIRONMENT and frame.f_locals.get("key") in _OF_RANKS:
        asked = f"the environment variable {frame.f_locals['key']}"
    while asked and caller is not None and _package(caller) in sys.stdlib_module_names:
        caller = caller.f_back
    if asked and caller is not None and _package(caller) not in _OTHERS:
        what = (
            f"its code asks {asked} ({Path(caller.f_code.co_filename).name}:{caller.f_lineno}): plain HF runs in "
        )
        what += "one process of its own, and a run's ranks get other answers"
        raise ScheduleError(Problem(what, remedy="have it compute without asking for processes"))


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__")).partition(".")[0]
