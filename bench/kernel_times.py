"""Kernels of a step of Megatron's trainer, by name and time, as torch's profiler sees them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import trainer_side

STEPS = 3
# Names of kernels made from templates go on for a thousand letters.
LONGEST_NAME = 160


def measure(side: trainer_side.Side, data: Iterator[dict[str, Any]]) -> dict[str, Any]:
    """Milliseconds of a step on the clock and in kernels, and its kernels by name."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    side.step(data)
    clock = [side.step(data) for _ in range(STEPS)]  # without the profiler, which costs the host something
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        for _ in range(STEPS):
            side.step(data)
        torch.cuda.synchronize()
    rows = table((event.name(), event.duration_ns()) for event in _kernels(profiled))
    return {
        "step_milliseconds": [1e3 * seconds for seconds in clock],
        "kernel_milliseconds": sum(row["milliseconds"] for row in rows),
        "kernels": rows,
    }


def _kernels(profiled: Any) -> Iterable[Any]:
    from torch.autograd import DeviceType

    events = profiled.profiler.kineto_results.events()
    return [event for event in events if event.device_type() == DeviceType.CUDA]


def table(events: Iterable[tuple[str, int]]) -> list[dict[str, Any]]:
    """Kernels of one step, those that take longest first.

    Args:
        events: name and nanoseconds of each kernel of ``STEPS`` steps.
    """
    taken: dict[str, list[int]] = defaultdict(list)
    for name, nanoseconds in events:
        taken[name[:LONGEST_NAME]].append(nanoseconds)
    rows = [
        {"name": name, "launches": len(each) / STEPS, "milliseconds": sum(each) / STEPS / 1e6}
        for name, each in taken.items()
    ]
    return sorted(rows, key=lambda row: -row["milliseconds"])
