"""Searches recorded grids as ``megasched tune`` would, from every corner and with many seeds.

A trial is a look into a CSV of ``bench/data``: two symbols, an outcome and samples per second. The figure is how
often the best point that a search found is within 1 % of the grid's best.

    python bench/tune_replay.py    # every sampler; writes bench/results/tune_replay.json
"""

from __future__ import annotations

import argparse
import csv
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import machine
import tune_grid_synthetic as synthetic

from megasched.tuner.outcome import Result
from megasched.tuner.space import Space
from megasched.tuner.study import Search

DATA = Path(__file__).parent / "data"
GRIDS = ("tune_grid_synthetic", "tune_grid_cpu")
MEMORY = {
    "batch_size": "grows",
    "micro_batch_size": "grows",
    "recompute": "shrinks",
    "recompute_layers": "shrinks",
}
SHARE = 0.2
NEAR = 0.01


@dataclass(frozen=True)
class Grid:
    """A recorded grid.

    Attributes:
        names: of its two symbols.
        scores: values of the two -> samples per second, or None where it did not fit.
    """

    names: tuple[str, str]
    scores: dict[tuple[Any, Any], float | None]

    def space(self, *, memory: bool = True) -> Space:
        """
        Args:
            memory: say how each symbol bears on memory.
        """
        space = Space()
        for axis, name in enumerate(self.names):
            values = sorted({point[axis] for point in self.scores})
            space.choice(name, values, memory=MEMORY[name] if memory else None)
        return space

    @property
    def best(self) -> float:
        return max(score for score in self.scores.values() if score is not None)

    @property
    def corners(self) -> list[tuple[Any, Any]]:
        ends = [(min(values), max(values)) for values in zip(*self.scores, strict=True)]
        return [(a, b) for a in ends[0] for b in ends[1]]


class Replay:
    """The runner of a recorded grid; each measurement is off by a normal error."""

    def __init__(self, grid: Grid, seed: int, noise: float) -> None:
        self.grid, self.random, self.noise = grid, random.Random(seed), noise

    def run(self, number: int, point: dict[str, Any]) -> Result:
        score = self.grid.scores[tuple(point[name] for name in self.grid.names)]
        if score is None:
            return Result("oom")
        return Result("ok", score * math.exp(self.random.gauss(0, self.noise)))


def read_grid(path: Path) -> Grid:
    with path.open(newline="") as file:
        found = list(csv.DictReader(line for line in file if not line.startswith("#")))
    first, second, *_ = found[0]
    scores = {
        (float(row[first]), float(row[second])): float(row["samples_per_second"])
        if row["outcome"] == "ok"
        else None
        for row in found
    }
    return Grid((first, second), scores)


def random_grid(seed: int) -> Grid:
    """Another machine of the synthetic model."""
    draw = random.Random(seed)
    made = synthetic.Machine(
        memory=draw.uniform(6, 70),
        kept=draw.uniform(0.03, 0.4),
        fixed=draw.uniform(1, 40),
        tile=draw.choice([1, 4, 8, 16]),
        extra=draw.uniform(0.15, 0.4),
        crowding=draw.choice([0.0, 0.002, 0.01]),
    )
    rows = list(synthetic.rows(made))
    return Grid(
        ("batch_size", "recompute"),
        {(row["batch_size"], row["recompute"]): row["samples_per_second"] for row in rows},
    )


def search(
    grid: Grid, sampler: str, start: Sequence[Any], seed: int, *, noise: float = 0.0, memory: bool = True
) -> list[float]:
    """For each trial, how far the best point so far, by what was measured, is below the grid's best."""
    space = grid.space(memory=memory)
    first = space.place(dict(zip(grid.names, start, strict=True)))
    chosen = Search(space, sampler, seed=seed, first=[first])
    tuning = chosen.run(Replay(grid, seed, noise), math.floor(SHARE * len(space.points)))
    found, best, gaps = 0.0, -1.0, []
    for trial in tuning.trials:
        if trial.result.score is not None and trial.result.score > best:
            best = trial.result.score
            found = grid.scores[tuple(trial.point[name] for name in grid.names)] or 0.0
        gaps.append(1 - found / grid.best)
    return gaps


def summarize(searches: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Of many searches: how many came near, the worst, and after how many trials they did."""
    near = [gaps for gaps in searches if gaps[-1] <= NEAR]
    trials = [next(i for i, gap in enumerate(gaps, 1) if gap <= NEAR) for gaps in near]
    return {
        "searches": len(searches),
        "within_1_percent": len(near) / len(searches),
        "optimum": sum(gaps[-1] == 0 for gaps in searches) / len(searches),
        "worst_gap": max(gaps[-1] for gaps in searches),
        "median_trials_to_1_percent": median(trials) if trials else None,
        "most_trials_to_1_percent": max(trials, default=None),
    }


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--seeds", type=int, default=10)
    options.add_argument("--random-grids", type=int, default=25)
    given = options.parse_args()
    found: dict[str, Any] = {}
    for sampler in ("model", "tpe", "grid"):
        for name in GRIDS:
            if not (DATA / f"{name}.csv").exists():
                continue
            grid = read_grid(DATA / f"{name}.csv")
            seeds = range(given.seeds)
            for what, more in {
                "": {},
                ", 1 % noise": {"noise": 0.01},
                ", memory not said": {"memory": False},
            }.items():
                runs = [search(grid, sampler, start, seed, **more) for start in grid.corners for seed in seeds]
                found[f"{sampler}: {name}, from the corners{what}"] = summarize(runs)
            runs = [search(grid, sampler, start, 0) for start in grid.scores]
            found[f"{sampler}: {name}, from every point"] = summarize(runs)
        grids = [random_grid(seed) for seed in range(given.random_grids)]
        runs = [search(grid, sampler, start, seed) for grid in grids for start in grid.corners for seed in (0, 1)]
        found[f"{sampler}: {given.random_grids} random grids, from the corners"] = summarize(runs)
    path = machine.write("tune_replay", {"trials": SHARE, "replays": found})
    for name, figures in found.items():
        print(f"{figures['within_1_percent']:7.1%}  worst {figures['worst_gap']:6.2%}  {name}")
    print(path)


if __name__ == "__main__":
    main()
