"""What `megasched plan` says of published runs on H100s: their throughput, and their place among all layouts.

The rows and their source are in `bench/data/published_runs.csv`. Those runs trained in 8 bits (tensorwise scales),
summed gradients in bf16 and overlapped what TP sends; the plans are told so. They also kept parameters in 8 bits
alone, which megasched does not: here a copy in bf16 stays beside them.

    python bench/published_runs.py
"""

from __future__ import annotations

import csv
import warnings
from pathlib import Path
from typing import Any

import machine
from shapes import model_folder

from megasched.planner.plan import PlanReport, plan
from megasched.planner.search import Candidate

DATA = Path(__file__).parent / "data" / "published_runs.csv"
LARGEST_CONTEXT = 2


def main() -> None:
    warnings.simplefilter("ignore")
    with DATA.open() as file:
        rows = [_row(published) for published in csv.DictReader(file)]
    worst = max(abs(row["error"]) for row in rows if row["error"] is not None)
    path = machine.write("published_runs", {"published": rows, "worst": worst})
    print(f"worst {worst:.1%}; wrote {path}")


def _row(published: dict[str, str]) -> dict[str, Any]:
    report = plan(
        model_folder(published["model"]),
        gpus=int(published["gpus"]),
        gpu="h100-80gb",
        sequence_length=int(published["sequence_length"]),
        global_batch_size=int(published["global_batch_size"]),
        fp8_recipe="tensorwise",
        grad_reduce_in_bf16=True,
        largest_context=LARGEST_CONTEXT,
    )
    wanted = tuple(int(published[name]) for name in ("tp", "pp", "cp"))
    ranked = report.ranked()
    places = [number for number, one in enumerate(ranked, 1) if _kind(one) == wanted]
    known = float(published["tokens_per_second_per_gpu"])
    found = _same(report, wanted, int(published["vp"]), int(published["micro_batch_size"]))
    row = {
        "model": published["model"],
        "gpus": int(published["gpus"]),
        "global_batch_size": int(published["global_batch_size"]),
        "layout": f"TP{wanted[0]} PP{wanted[1]} VPP{published['vp']} CP{wanted[2]}",
        "published": known,
        "predicted": None,
        "error": None,
        "place": places[0] if places else None,
        "of": len(ranked),
        "first": str(ranked[0].layout),
        "predicted_of_first": round(report.tokens_per_second(ranked[0])),
        "source": published["source"],
    }
    if found is not None:
        speed = report.tokens_per_second(found)
        row |= {
            "layout_predicted": str(found.layout),
            "predicted": round(speed),
            "error": round(speed / known - 1, 4),
            "memory_gib": round(found.fullest.total / 2**30, 1),
            "seconds": {name: round(value, 3) for name, value in found.time.parts.items()} if found.time else {},
        }
    print(row, flush=True)
    return row


def _kind(candidate: Candidate) -> tuple[int, ...]:
    layout = candidate.layout
    return layout.tp, layout.pp, layout.cp


def _same(report: PlanReport, wanted: tuple[int, ...], chunks: int, batch: int) -> Candidate | None:
    """The candidate of that layout without recompute whose chunks are nearest to the published ones."""
    alike = [
        one
        for one in report.fitting
        if _kind(one) == wanted and one.layout.micro_batch_size == batch and not one.recompute_granularity
    ]
    return min(alike, key=lambda one: abs(one.layout.vpp - chunks), default=None)


if __name__ == "__main__":
    main()
