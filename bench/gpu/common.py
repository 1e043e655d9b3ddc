"""What the steps of the check share; benchmarks are found beside them."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.append(str(HERE.parent))


def on_ghost(gpus: int, te: bool) -> dict[str, str]:
    """Variables of a process on ghost GPUs, with or without Transformer Engine (docs/ghost.md)."""
    sys.path.append(str(ROOT))  # the ghost is of the tests
    from tests.ghost import process

    return process.environment(tempfile.mkdtemp(prefix="ghost"), gpus, te, **process.INTEGERS)
