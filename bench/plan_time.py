"""How long `megasched plan` takes for a large job, and how much memory: the whole command, imports and all.

Memory is that of all processes together, pages they share counted once (PSS), looked at every two seconds: a look
stops a process for a while.

    python bench/plan_time.py
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import machine
from shapes import SHAPES, model_folder

# Shape, GPUs, sequences in a step, the most ranks that share one.
LOOK_SECONDS = 2.0
JOBS = [("8b", 64, 512, 1), ("405b", 16384, 2048, 2)]


def measure(shape: str, gpus: int, batch: int, cp: int) -> dict[str, Any]:
    """Of one command in a process of its own."""
    words = ["--hf-model", model_folder(shape), "--gpus", gpus, "--global-batch-size", batch, "--max-cp", cp]
    words += ["--seq-length", SHAPES[shape]["max_position_embeddings"], "--gpu", "h100-80gb", "--json"]
    command = [sys.executable, "-m", "megasched", "plan", *map(str, words)]
    before, start = machine.cpu_seconds_of_children(), time.perf_counter()
    with tempfile.TemporaryFile() as output:
        running = subprocess.Popen(command, stdout=output, stderr=subprocess.DEVNULL)
        peak = 0
        while running.poll() is None:
            peak = max(peak, _resident(running.pid))
            with suppress(subprocess.TimeoutExpired):
                running.wait(LOOK_SECONDS)
        wall = time.perf_counter() - start
        output.seek(0)
        written = output.read().count(b'"step_seconds"')
    if running.returncode:
        raise SystemExit(f"{' '.join(command)}: exit status {running.returncode}")
    found = {"shape": shape, "gpus": gpus, "max_cp": cp, "fitting": written, "wall_seconds": wall}
    return {**found, "cpu_seconds": machine.cpu_seconds_of_children() - before, "peak_bytes": peak}


def _resident(pid: int) -> int:
    """PSS of a process and all below it, in bytes; 0 for one that has ended meanwhile."""
    process = Path("/proc") / str(pid)
    try:
        lines = (process / "smaps_rollup").read_text().splitlines()
        children = (process / "task" / str(pid) / "children").read_text().split()
    except OSError:
        return 0
    own = next((int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0) * 1024
    return own + sum(_resident(int(child)) for child in children)


def main() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    rows = []
    for job in JOBS:
        rows.append(measure(*job))
        print(rows[-1], flush=True)
    print(machine.write("plan_time", {"plans": rows}))


if __name__ == "__main__":
    main()
