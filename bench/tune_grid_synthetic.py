"""Makes ``bench/data/tune_grid_synthetic.csv``: throughput over batch size and recompute ratio, by a small model.

Memory: for each sequence its activations, of which recompute keeps all but the layers it covers. Time:
a fixed part, and one that grows with the batch in tiles of 8 sequences, a third more of it for what is recomputed.
So the throughput grows with the batch until memory is used up, recompute buys larger batches at a price, and the
best point lies inside the grid. The constants are of no machine.

    python bench/tune_grid_synthetic.py
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent / "data"
BATCHES = (4, 8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80)
RATIOS = tuple(round(i / 6, 3) for i in range(7))


@dataclass(frozen=True)
class Machine:
    """A model on a device, in units of one sequence's forward and activations.

    Attributes:
        memory: of the device, beside weights.
        kept: activations that a recomputed layer still keeps, of all.
        fixed: time of a step that does not depend on the batch.
        tile: sequences that a kernel computes in one wave.
        extra: time of a forward to recompute all, of a forward and backward.
        crowding: time that each further sequence adds to all others, where caches are too small for them.
    """

    memory: float = 26.0
    kept: float = 0.12
    fixed: float = 14.0
    tile: int = 8
    extra: float = 0.3
    crowding: float = 0.002

    def score(self, batch: int, ratio: float) -> float | None:
        """Samples per second; None where it runs out of memory."""
        if batch * (1 - ratio * (1 - self.kept)) > self.memory:
            return None
        waves = math.ceil(batch / self.tile) * self.tile
        time = self.fixed + (0.8 * batch + 0.2 * waves) * (1 + self.extra * ratio)
        time += self.crowding * batch**2
        return round(100 * batch / time, 2)


def rows(machine: Machine) -> Iterator[dict[str, Any]]:
    for batch in BATCHES:
        for ratio in RATIOS:
            score = machine.score(batch, ratio)
            outcome = "oom" if score is None else "ok"
            yield {"batch_size": batch, "recompute": ratio, "outcome": outcome, "samples_per_second": score}


def main() -> None:
    found = list(rows(Machine()))
    path = DATA / "tune_grid_synthetic.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, found[0].keys())
        writer.writeheader()
        writer.writerows(found)
    fitting = [row for row in found if row["outcome"] == "ok"]
    best = max(fitting, key=lambda row: row["samples_per_second"])
    print(f"{len(found)} points, {len(fitting)} fit; best: {best}; {path}")


if __name__ == "__main__":
    main()
