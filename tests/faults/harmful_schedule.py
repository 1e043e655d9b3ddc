"""A schedule that is as good as any, in a file that does harm: user code that every rank runs before it trains.

``FAULT`` names a function here, ``FAULT_RANK`` the rank that it harms.
Saves are harmed when the checkpoint of iteration 4 is written.
"""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
HARMED = "iter_0000004"
HARMED_STEP = 4

schedule = runpy.run_path(str(ROOT / "examples" / "schedules" / "llama.py"))["schedule"]


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _before(owner: Any, name: str, wanted: Callable[..., bool]) -> None:
    """Dies before a function is called with arguments that are ``wanted``."""
    function = getattr(owner, name)

    @wraps(function)
    def dies(*given: Any, **named: Any) -> Any:
        if wanted(*given):
            _kill()
        return function(*given, **named)

    setattr(owner, name, dies)


def killed_in_a_step() -> None:
    """With the gradients computed, and not yet applied."""
    from megatron.training import training

    steps: list[int] = []

    def last(*given: Any) -> bool:
        steps.append(1)
        return len(steps) == HARMED_STEP - 2  # it goes on after iteration 2

    _before(training, "finalize_model_grads", last)


def read_only_before_a_save() -> None:
    """The disk of ``FAULT_DISK``, as a file server does after a fault."""
    from megatron.training import training

    save = training.save_checkpoint

    @wraps(save)
    def harmed(iteration: int, *given: Any, **named: Any) -> Any:
        if iteration == HARMED_STEP:
            subprocess.run(["mount", "-o", "remount,ro", os.environ["FAULT_DISK"]], check=True)
        return save(iteration, *given, **named)

    training.save_checkpoint = harmed


def killed_in_its_tensors() -> None:
    """With a part of its file written."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    written: list[int] = []

    def some(transforms: Any, stream: Any, *given: Any) -> bool:
        if HARMED not in stream.name:
            return False
        written.append(1)
        stream.flush()
        return len(written) == 10

    _before(filesystem_async, "_write_item", some)


def killed_before_the_metadata() -> None:
    """All tensors are written, and nothing that says which they are."""
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    _before(FileSystemWriterAsync, "finish", lambda writer, *given: HARMED in str(writer.path))


def began_an_hour_ago() -> None:
    """No harm, but for ``--exit-duration-in-mins``."""
    from megatron.training import training

    training._TRAIN_START_TIME -= 3600


if os.environ.get("RANK") == os.environ.get("FAULT_RANK"):
    globals()[os.environ["FAULT"]]()
