"""Opens files of safetensors that somebody else has written."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megasched.errors import CheckpointError
from megasched.reading.files import Expected, open_regular

SAFETENSORS = Expected("a file of safetensors", CheckpointError)


@contextmanager
def open_safetensors(
    path: str | os.PathLike[str], key: str = "", expected: Expected = SAFETENSORS
) -> Iterator[Any]:
    """Opens the file for tensors of torch.

    Args:
        key: of the tensor that it is opened for.

    Raises:
        MegaschedError: ``expected.error``, with file and tensor, also for what goes wrong inside of the context.
    """
    from safetensors import SafetensorError, safe_open

    about = f"{path}, tensor {key}" if key else path
    with open_regular(path, expected):
        pass  # safe_open itself would wait for who writes to a FIFO
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError, ValueError, OverflowError, MemoryError) as error:
        raise expected.refusal(about, f"can't be read as safetensors: {error}") from error
