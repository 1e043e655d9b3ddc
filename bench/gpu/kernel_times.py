"""Kernels of a step of block and of native, by name and time, as torch's profiler sees them.

python bench/gpu/kernel_times.py FOLDER [--shape 1b]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import common  # noqa: F401 (benchmarks are found then)
from contenders import all_contenders
from one_rank import one_rank
from shapes import SHAPES

from megasched.files import write_whole

SIDES = ("native", "megasched_block")
STEPS = 3


def measure(name: str, shape: str) -> dict[str, Any]:
    """Milliseconds of a step of a contender, on the clock and in kernels, and its kernels by name."""
    import torch
    import trainer_side
    from torch.profiler import ProfilerActivity, profile

    contender = all_contenders()[name]
    setting = trainer_side.Setting(shape, micro_batch_size=2, bf16=True)
    args = trainer_side.start(setting, contender.schedule)
    side, data = trainer_side.build(args, contender.builder), trainer_side.batches(setting)
    for _ in range(3):
        side.step(data)
    clock = [side.step(data) for _ in range(STEPS)]  # without the profiler, which costs the host something
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        for _ in range(STEPS):
            side.step(data)
        torch.cuda.synchronize()
    events = [(event.name(), event.duration_ns()) for event in _kernels(profiled)]
    rows = table(events)
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
        taken[name].append(nanoseconds)
    rows = [
        {"name": name, "launches": len(each) / STEPS, "milliseconds": sum(each) / STEPS / 1e6}
        for name, each in taken.items()
    ]
    return sorted(rows, key=lambda row: -row["milliseconds"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="1b")
    parser.add_argument("--worker", choices=SIDES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        found = measure(options.worker, options.shape)
        write_whole(options.folder / f"{options.worker}.json", [json.dumps(found, indent=1), "\n"])
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # process groups and threads are nobody's business any more
    options.folder.mkdir(parents=True, exist_ok=True)
    codes = []
    for name in SIDES:
        command = [sys.executable, __file__, str(options.folder), "--shape", options.shape, "--worker", name]
        codes.append(subprocess.run(command, env={**os.environ, **one_rank()}, check=False).returncode)
    if any(codes):
        return 1
    unseen = [name for name in SIDES if not json.loads((options.folder / f"{name}.json").read_text())["kernels"]]
    if unseen:
        print(f"torch's profiler has seen no kernel of {' and '.join(unseen)}", file=sys.stderr)
    return int(bool(unseen))


if __name__ == "__main__":
    sys.exit(main())
