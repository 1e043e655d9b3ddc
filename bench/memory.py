"""Memory of this process, in bytes: of the GPU where there is one, resident otherwise."""

from __future__ import annotations

from pathlib import Path

import machine


def allocated() -> int:
    """What is allocated now."""
    import torch

    return torch.cuda.memory_allocated() if machine.on_gpu() else resident_bytes()


def forget_peak() -> None:
    """Peaks of ``peak`` are counted from here."""
    import torch

    torch.cuda.reset_peak_memory_stats() if machine.on_gpu() else reset_peak()


def peak() -> int:
    """The highest of ``allocated`` since ``forget_peak``."""
    import torch

    return torch.cuda.max_memory_allocated() if machine.on_gpu() else peak_resident_bytes()


def resident_bytes() -> int:
    """Resident memory now."""
    return _status("VmRSS")


def peak_resident_bytes() -> int:
    """Highest resident memory since the process began, or since ``reset_peak``."""
    return _status("VmHWM")


def reset_peak() -> None:
    """Peaks are counted from here."""
    # 5 resets the highest resident memory (man 5 proc); a container may forbid it, and then the peak is the
    # process's.
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(field + ":")))
