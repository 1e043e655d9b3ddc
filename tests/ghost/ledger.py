"""What a process has asked of its ghost GPU (cuda/ledger.h)."""

from __future__ import annotations

import ctypes
import os
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

# Kinds of events that run on the GPU's multiprocessors. A memset or a copy within the device is an engine's work,
# and a collective is counted by its bytes.
KERNELS = ("kernel", "gemm", "cudnn")


def kind(event: str) -> str:
    """``kernel``, ``gemm``, ``cudnn``, ``nccl``, ``copy``, ``memset``, ``sync``, ``event`` or ``mark``."""
    return event.partition(":")[0]


@contextmanager
def recording() -> Iterator[list[str]]:
    """Fills the list with the events of the block when it ends. Blocks don't nest."""
    ghost = ctypes.CDLL(None)
    events: list[str] = []
    ghost.ghost_start()
    yield events
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "events")
        if ghost.ghost_write(path.encode()):
            raise OSError(f"the ghost can't write {path}")
        events += Path(path).read_text().splitlines()


def kernels(events: Sequence[str]) -> Counter[str]:
    """How many times each kernel is launched."""
    return Counter(event for event in events if kind(event) in KERNELS)


def waits(events: Sequence[str]) -> int:
    """How many times the host waits for the device."""
    return sum(kind(event) == "sync" for event in events)
