"""Defines clocks of a rank: marks cost nothing when they are made, and are turned into seconds later."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median
from typing import Any, Protocol

from megasched.reading.files import Expected, read_text

BOOT_ID = Expected("Linux's number of this start of the machine")
# Passed at the start, the first only to set the communicator up.
BARRIERS = 8


class Clock(Protocol):
    """Makes marks in the order of the work, and says when each was reached."""

    def mark(self) -> Any: ...

    def seconds(self, mark: Any) -> float:
        """Returns when a mark was reached on this rank's clock; may wait until the work before it is done."""
        ...


class WallClock:
    """Reads the clock of a CPU, where work is done when its call returns."""

    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, mark: float) -> float:
        return mark


class CudaClock:
    """Marks times by CUDA events on the current stream: no mark waits, the device stamps it when it gets there."""

    def __init__(self) -> None:
        import torch

        self._event = lambda: torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        before = time.perf_counter()
        self._base = self.mark()
        self._base.synchronize()
        # The device was idle: it stamped the event somewhere in between.
        self._base_seconds = (before + time.perf_counter()) / 2

    def mark(self) -> Any:
        event = self._event()
        event.record()
        return event

    def seconds(self, mark: Any) -> float:
        mark.synchronize()
        return self._base_seconds + self._base.elapsed_time(mark) / 1e3


def start_clock() -> tuple[Clock, list[float]]:
    """Starts this rank's clock, on all ranks together; also returns when it left each of some barriers.

    Ranks leave a barrier at nearly the same time, so that their clocks can be compared (`offset`).
    """
    import torch

    # torch.accelerator tells the truth in a rehearsal, torch.cuda does not.
    clock = CudaClock() if torch.accelerator.is_available() else WallClock()
    left = []
    for _ in range(BARRIERS):
        torch.distributed.barrier()
        left.append(time.perf_counter())
    return clock, left[1:]


def host() -> str:
    """Returns what identifies a machine's last start: all processes since then share its clock."""
    return read_text("/proc/sys/kernel/random/boot_id", BOOT_ID).strip()


def offset(left: Sequence[float], left_there: Sequence[float]) -> tuple[float, float]:
    """Returns by how much one rank's clock is ahead of another's, and how uncertain that is, in seconds.

    Args:
        left: when the first rank left each barrier, on its clock.
        left_there: when the other left each, on its own.

    Returns:
        The median of the differences, and half of their range.
    """
    ahead = [here - there for here, there in zip(left, left_there, strict=True)]
    return median(ahead), (max(ahead) - min(ahead)) / 2
