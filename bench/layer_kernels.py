"""Kernels of a layer, forward and backward, for each contender, on a ghost GPU: no GPU is needed.

The real trainer, torch's CUDA build and, with ``--te``, Transformer Engine run on ghost CUDA (``tests/ghost``),
which computes nothing and counts every launch. Two models of different depth give what a layer costs.

    python bench/layer_kernels.py --shape 1b --bf16 --te --name kernels_1b_te
    python bench/layer_kernels.py --shape qwen3-1.7b --bf16 --contenders native megasched_fused
    python bench/layer_kernels.py --shape 1b --bf16 --te --ranks 2 --tensor-model-parallel-size 2
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import contenders
import machine
import trainer_side

sys.path.append(str(Path(__file__).parents[1]))  # for the ghost, which is of the tests

from tests.ghost import process
from tests.ghost.ledger import kernels, waits

DEPTHS = (2, 3)


def count(
    contender: contenders.Contender, setting: trainer_side.Setting, te: bool, ranks: int = 1
) -> dict[str, Any]:
    """What a layer of a contender costs the first rank; see ``of_layer``."""
    measured = []
    mixture = "num_local_experts" in trainer_side.shapes.SHAPES[setting.shape]
    integers = process.INTEGERS if mixture else {}  # without them, experts get no tokens
    with tempfile.TemporaryDirectory() as folder:
        for layers in DEPTHS:
            spec = {**asdict(contender), "layers": layers, "setting": asdict(setting)}
            output = Path(folder) / f"{layers}.json"
            worker = str(Path(__file__).with_name("layer_worker.py"))
            process.run([worker, json.dumps(spec), str(output)], ranks=ranks, te=te, **integers)
            measured.append(json.loads(output.read_text()))
    return of_layer(*measured)


def of_layer(fewer: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """What one layer adds: kernels by name of each pass, bytes kept for the backward, and waits of the host.

    ``kept_bytes`` is what torch's allocator holds after a forward. ``moved_bytes`` is what kernels beside products
    and attention read and write, by the operation. ``waits`` are those of a whole step of the
    smaller model, and what a layer adds to them.
    """
    found: dict[str, Any] = {}
    for part in ("forward", "backward"):
        added = kernels(more[part])
        added.subtract(kernels(fewer[part]))
        found[part] = {"kernels": added.total(), "by_name": dict(sorted((+added).items()))}
    moved = Counter(more["moved"])
    moved.subtract(fewer["moved"])
    found["moved_bytes"] = {"all": moved.total(), "by_name": dict(sorted((+moved).items()))}
    found["kept_bytes"] = more["kept"] - fewer["kept"]
    found["bytes_before"] = more["before"] - fewer["before"]
    found["waits"] = {
        "forward and backward": waits(fewer["forward"]) + waits(fewer["backward"]),
        "step": waits(fewer["step"]),
        "step, per layer": waits(more["step"]) - waits(fewer["step"]),
    }
    return found


def main(argv: list[str] | None = None) -> int:
    known = contenders.all_contenders()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="1b", choices=list(trainer_side.shapes.SHAPES))
    parser.add_argument("--contenders", nargs="+", default=list(known), choices=list(known), metavar="NAME")
    parser.add_argument("--micro-batch-size", type=int, default=1)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--te", action="store_true", help="with Transformer Engine")
    parser.add_argument("--ranks", type=int, default=1, help="processes; flags of the layout are Megatron's")
    parser.add_argument("--name", help="of the results file; none is written otherwise")
    options, extra = parser.parse_known_args(argv)
    flags = (*(() if options.te else process.WITHOUT_TE), "--no-check-for-nan-in-loss-and-grad", *extra)
    setting = trainer_side.Setting(options.shape, options.micro_batch_size, options.bf16, extra=flags)
    found, left_out = {}, {}
    for name in options.contenders:
        try:
            found[name] = count(known[name], setting, options.te, options.ranks)
        except process.Failed as error:
            lines = str(error).splitlines()
            left_out[name] = next((line for line in reversed(lines) if "Error: " in line), lines[-1])
            print(f"{name:18} LEFT OUT, {left_out[name]}", flush=True)
            continue
        said = "/".join(str(found[name][part]["kernels"]) for part in ("forward", "backward"))
        kept, moved = found[name]["kept_bytes"] / 1e6, found[name]["moved_bytes"]["all"] / 1e6
        print(f"{name:18} kernels {said:8} kept {kept:6.0f} MB  moved {moved:6.0f} MB", flush=True)
    if options.name:
        result = {"setting": asdict(setting), "te": options.te, "ranks": options.ranks}
        result |= {"layers": found, "left_out": left_out}
        print(machine.write(options.name, result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
