"""Step time of a scheduled HF model against Megatron's own model of the same shape, on several ranks.

Both are built in one launch, with one set of flags, and step in turn on the same batch, so that what else
the machine does hits both alike. The figure is the median over rounds of megasched's time divided by
native's. ``contenders.py`` compares more of them, on one rank.

    python -m torch.distributed.run --nproc-per-node 2 bench/step_time.py --tp 2 --rehearse
    python -m torch.distributed.run --nproc-per-node 1 bench/step_time.py --shape 1b --bf16
"""

from __future__ import annotations

import argparse
from typing import Any

import machine
import native
import trainer_side
from ratios import ratio, spread
from shapes import SHAPES

BUILDERS = {"native": native.NATIVE, "megasched": trainer_side.MEGASCHED}


def main() -> None:
    own = argparse.ArgumentParser(description=__doc__)
    own.add_argument("--shape", choices=SHAPES, default="small")
    own.add_argument("--tp", type=int, default=1)
    own.add_argument("--sp", action="store_true")
    own.add_argument("--micro-batch-size", type=int, default=1)
    own.add_argument("--rounds", type=int, default=15)
    own.add_argument("--warmup", type=int, default=3)
    own.add_argument("--bf16", action="store_true")
    own.add_argument("--rehearse", action="store_true")
    own.add_argument("--name", help="of the results file; made from the options otherwise")
    options = own.parse_args()
    setting = trainer_side.setting_from(options)
    args = trainer_side.start(setting)
    stage_inputs = {name: trainer_side.build(args, builder) for name, builder in BUILDERS.items()}
    report(measure(stage_inputs, setting, options), options)


def measure(
    stage_inputs: dict[str, trainer_side.Side], setting: trainer_side.Setting, options: argparse.Namespace
) -> dict[str, list[float]]:
    """Name -> seconds of each step, the two in turn and in changing order."""
    import torch

    data = trainer_side.batches(setting)
    times: dict[str, list[float]] = {name: [] for name in stage_inputs}
    for round_number in range(options.warmup + options.rounds):
        for name in list(stage_inputs) if round_number % 2 else list(reversed(stage_inputs)):
            torch.distributed.barrier()
            seconds = stage_inputs[name].step(data)
            if round_number >= options.warmup:
                times[name].append(seconds)
    return times


def results(times: dict[str, list[float]], options: argparse.Namespace) -> dict[str, Any]:
    """The figures, as they go into the results file."""
    slower = ratio(times["native"], times["megasched"])
    return {
        "options": vars(options),
        "median_seconds": {name: spread(found)["median"] for name, found in times.items()},
        "ratio_median": slower["median"],
        "ratio_quartiles": [slower["low_quartile"], slower["high_quartile"]],
        "seconds": times,
    }


def report(times: dict[str, list[float]], options: argparse.Namespace) -> None:
    import torch

    if torch.distributed.get_rank():
        return
    data = results(times, options)
    parts = ["step_time", options.shape, f"tp{options.tp}", *(["sp"] if options.sp else [])]
    name = options.name or "_".join([*parts, "cpu" if options.rehearse else "gpu"])
    path = machine.write(name, data)
    medians = ", ".join(f"{name} {1000 * value:.1f} ms" for name, value in data["median_seconds"].items())
    low, high = data["ratio_quartiles"]
    ratio_text = f"megasched / native = {data['ratio_median']:.3f} (quartiles {low:.3f} to {high:.3f})"
    print(f"{medians}; {ratio_text}; {path}")


if __name__ == "__main__":
    main()
