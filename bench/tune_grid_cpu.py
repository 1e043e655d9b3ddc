"""Measures ``bench/data/tune_grid_cpu.csv``: a small Llama under Megatron's ``train_step``, on one core.

Micro-batch size x recomputed layers (``--recompute-method block``). Time is the processor time of a step, which
other work on the machine changes little; the smallest of several. There is no small device memory here, so the
limit is emulated: the bytes that the forward saves for the backward are counted, parameters left out, and a point
that saves more than LIMIT counts as out of memory. It is measured all the same, and its time is in the file.

    python bench/tune_grid_cpu.py
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import machine
import trainer_side

DATA = Path(__file__).parent / "data"
BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 40, 48, 64)
LAYERS = range(7)
LIMIT = 64 * 2**20
WARM_UP, STEPS = 2, 7
ONE_RANK = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29591"}
ONE_RANK |= {"OMP_NUM_THREADS": "1", "MEGASCHED_REHEARSE": "1"}
COLUMNS = ("micro_batch_size", "recompute_layers", "outcome", "samples_per_second", "step_seconds", "saved_bytes")


def measure(layers: int) -> list[dict[str, Any]]:
    """One column of the grid, in this process; batch sizes in turn, several times."""
    extra = (
        "--recompute-granularity",
        "full",
        "--recompute-method",
        "block",
        "--recompute-num-layers",
        str(layers),
    )
    setting = trainer_side.Setting("tune", 1, rehearse=True, extra=extra if layers else ())
    side = trainer_side.build(trainer_side.start(setting), trainer_side.MEGASCHED)
    data = {size: trainer_side.batches(replace(setting, micro_batch_size=size)) for size in BATCHES}
    saved = {size: saved_bytes(side, data[size]) for size in BATCHES}
    seconds: dict[int, list[float]] = {size: [] for size in BATCHES}
    for turn in range(WARM_UP + STEPS):
        for size in BATCHES:
            start = time.process_time()
            side.step(data[size])
            if turn >= WARM_UP:
                seconds[size].append(time.process_time() - start)
    return [row(size, layers, min(seconds[size]), saved[size]) for size in BATCHES]


def row(size: int, layers: int, seconds: float, saved: int) -> dict[str, Any]:
    fits = saved <= LIMIT
    figures = ("ok" if fits else "oom", round(size / seconds, 2) if fits else None, round(seconds, 5), saved)
    return dict(zip(COLUMNS, (size, layers, *figures), strict=True))


def saved_bytes(side: trainer_side.Side, data: Any) -> int:
    """What one forward keeps for its backward, each storage once."""
    import torch

    kept: dict[int, int] = {}
    parameters = {parameter.untyped_storage().data_ptr() for parameter in side.model[0].parameters()}

    def count(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        output, _ = trainer_side.forward_step(data, side.model[0])
    del output
    return sum(kept.values())


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--layers", type=int, help="Measure this column only, and print it as JSON.")
    given = options.parse_args()
    if given.layers is not None:
        print(json.dumps(measure(given.layers)))
        return
    found = []
    for layers in LAYERS:
        command = [sys.executable, __file__, "--layers", str(layers)]
        run = subprocess.run(command, env=os.environ | ONE_RANK, stdout=subprocess.PIPE, text=True, check=True)
        found += json.loads(run.stdout.splitlines()[-1])
    found.sort(key=lambda each: (each["micro_batch_size"], each["recompute_layers"]))
    path = DATA / "tune_grid_cpu.csv"
    with path.open("w", newline="") as file:
        for name, value in machine.describe().items():
            file.write(f"# {name}: {value}\n")
        file.write(f"# limit of saved bytes: {LIMIT}\n")
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(found)
    fitting = [each for each in found if each["outcome"] == "ok"]
    best = max(fitting, key=lambda each: each["samples_per_second"])
    print(f"{len(found)} points, {len(fitting)} fit; best: {best}; {path}")


if __name__ == "__main__":
    main()
