"""What ``megasched plan`` says of memory and time, beside what the contenders of this check have held and taken.

It needs no GPU: the figures are those of the steps before it, of this machine, and the plan is made with the file
that the calibration has written.

    python bench/gpu/planned.py FOLDER
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import common  # noqa: F401 (the benchmarks are found then)
import contenders
import shapes

from megasched.files import write_whole

PREFIX = "megasched_"
RECIPES = {"bf16": None, "fp8": "delayed"}  # Megatron's default


def measured(results: Path) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(precision, level, the setting and figures) of each of megasched's contenders that there are results of.

    Args:
        results: the folder of the check.
    """
    for path in sorted(results.glob("*/contenders.json")):
        data = json.loads(path.read_text())
        precision = "fp8" if contenders.FP8[0] in data["setting"]["extra"] else "bf16"
        for name in data["rounds"]:
            if name.startswith(PREFIX):
                figures = {"peak_bytes": data["peak_bytes"][name], "seconds": data["rounds"][name]}
                yield precision, name.removeprefix(PREFIX), {**data["setting"], **figures}


def planned(shape: str, level: str, precision: str, batch: int, gpu: str) -> dict[str, Any]:
    """The layout of one GPU without recompute, as ``megasched plan --json`` has it, or why there is none."""
    size = str(shapes.SHAPES[shape]["max_position_embeddings"])
    command = ["plan", "--json", "--hf-model", shapes.model_folder(shape), "--gpus", "1", "--gpu", gpu]
    command += ["--model-schedule", contenders.LEVELS[level]]
    command += ["--seq-length", size, "--global-batch-size", str(batch)]
    recipe = RECIPES[precision]
    command += ["--fp8-recipe", recipe] if recipe else []
    command = [sys.executable, "-m", "megasched", *command]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if not done.stdout.strip():
        return {"why": done.stderr.strip()[-500:]}
    layouts = json.loads(done.stdout)["layouts"]
    wanted = [one for one in layouts if one["flags"]["micro_batch_size"] == batch]
    plain = [one for one in wanted if "recompute_granularity" not in one["flags"]]
    return (
        plain[0] if plain else {"why": f"of {len(layouts)} that fit, none has this micro-batch and no recompute"}
    )


def beside(figures: Mapping[str, Any], plan: Mapping[str, Any]) -> dict[str, Any]:
    """A row: what was measured, what was said, and how far off that is, as a part of what was measured."""
    seconds = statistics.median(figures["seconds"])
    row = {"measured_bytes": figures["peak_bytes"], "measured_seconds": seconds}
    if "why" in plan:
        return {**row, "why": plan["why"]}
    (memory,) = plan["memory_bytes"]
    return {
        **row,
        "planned_bytes": memory["total"],
        "planned_seconds": plan["step_seconds"],
        "parts": memory,
        "bytes_off": memory["total"] / figures["peak_bytes"] - 1 if figures["peak_bytes"] else None,
        "seconds_off": plan["step_seconds"] / seconds - 1,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of this step; those of the steps before it are beside it")
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    calibrated = folder.parent / "calibration" / "gpu.toml"
    gpu = str(calibrated) if calibrated.exists() else "h100-80gb"
    rows: list[dict[str, Any]] = []
    for precision, level, figures in measured(folder.parent):
        shape, batch = figures["shape"], figures["micro_batch_size"]
        row = beside(figures, planned(shape, level, precision, batch, gpu))
        rows.append({"shape": shape, "precision": precision, "level": level, **row})
        write_whole(folder / "planned.json", [json.dumps({"gpu": gpu, "rows": rows}, indent=1), "\n"])
        print(json.dumps(rows[-1]), flush=True)
    return int(not rows or any("why" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
