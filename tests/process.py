"""A process that can import packages which lie apart from the environment, where ``make setup`` puts them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TE = Path(sys.prefix) / "te"  # Transformer Engine's Python modules: Megatron picks other classes where they are
OLDEST = Path(sys.prefix) / "oldest"  # the oldest transformers that is supported


def run_case(packages: Path, module: str, *arguments: str, timeout: float = 300) -> Any:
    """What a module of the tests prints as its last line, in JSON.

    Args:
        packages: folder that comes before the environment's own packages.
        module: e.g. ``tests.te.blocks_case``.
        arguments: of its command line.
        timeout: seconds.
    """
    assert packages.is_dir(), f"{packages} is missing: run `make setup`"
    path = os.pathsep.join([str(ROOT), str(packages)])
    run = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return json.loads(run.stdout.splitlines()[-1])
