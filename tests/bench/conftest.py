"""The benchmarks are scripts that import one another from their own folder."""

import sys
from pathlib import Path

BENCH = Path(__file__).parents[2] / "bench"
sys.path[:0] = [str(BENCH), str(BENCH / "gpu")]
