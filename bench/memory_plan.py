"""What `megasched plan` says of memory against what rehearsals of the trainer hold, by architecture and layout.

Both are live bytes of tensors (`megasched/planner/measure/live_bytes.py`) at the fullest moment of a step, on each
rank.

    python bench/memory_plan.py
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import machine

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megasched.language.parallel_dims import ParallelDims
from megasched.verify.ranks.pool import RankPool
from tests.planner.configs import config_of
from tests.planner.memory_case import FULL, argv_of, predict
from tests.planner.rank_case import step_peak

ONE: dict[str, Any] = {}
DP2 = {"data_parallel_size": 2}
TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PP2 = {"pipeline_model_parallel_size": 2}
VPP2 = {**PP2, "virtual_pipeline_model_parallel_size": 2}
SHARDED = "--use-distributed-optimizer"

CASES: list[tuple[str, dict[str, Any], str]] = [
    ("llama", ONE, ""),
    ("llama", TP2, "--bf16"),
    ("llama", PP2, ""),
    ("llama", VPP2, "--bf16"),
    ("llama", VPP2, FULL),
    ("llama", {**TP2, **PP2}, FULL),
    ("llama", DP2, f"--bf16 {SHARDED}"),
    ("gemma2", TP2, ""),
    ("gemma2", PP2, "--bf16"),
    ("gpt2", TP2, "--bf16"),
    ("gpt2", PP2, ""),
    ("gpt2", VPP2, FULL),
    ("mixtral", ONE, ""),
    ("mixtral", PP2, ""),
    ("mixtral", DP2, SHARDED),
]


def main() -> None:
    rows = []
    with RankPool() as ranks, tempfile.TemporaryDirectory() as folder:
        for name, parallel, flags in CASES:
            model = Path(folder) / name
            config_of(name).save_pretrained(model)
            layout = ParallelDims(**parallel)
            held = ranks.run(layout.world_size, step_peak, str(model), argv_of(layout, flags))
            predicted = predict(str(model), layout, flags)
            for rank, found in enumerate(held):
                said = predicted[rank // (layout.world_size // layout.pp)].total
                error = said / found["peak"] - 1
                rows.append(
                    {"model": name, "layout": str(layout), "flags": flags, "rank": rank, "measured": found["peak"]}
                    | {"predicted": said, "error": round(error, 5)}
                )
                print(f"{name:8} {layout!s:16} {flags:20.20} rank {rank}: {error:+.2%}", flush=True)
    worst = max(abs(row["error"]) for row in rows)
    print(f"{len(CASES)} configurations, worst {worst:.2%}")
    print(machine.write("memory_plan", {"configurations": len(CASES), "worst": worst, "rows": rows}))


if __name__ == "__main__":
    main()
