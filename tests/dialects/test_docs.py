"""The code of docs/deepspeed.md runs, and prints what the page shows."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.dialects.deepspeed_ranks import DEEPSPEED
from tests.test_docs import ROOT, blocks, run_code_on_a_rank


def test_the_page_runs(deepspeed_ranks: Any) -> None:
    found, ran = blocks(ROOT / "docs" / "deepspeed.md"), 0
    for block, after in itertools.pairwise(found):
        if on_ranks := re.fullmatch(r"ranks=(\d+)", block.info):
            printed = deepspeed_ranks.run(int(on_ranks[1]), run_code_on_a_rank, block.text)[0]
            assert after.language == "text"
            assert printed.splitlines()[-1] == after.text.rstrip()
            ran += 1
    assert ran == 4


@pytest.mark.slow
def test_deepspeeds_launcher_starts_a_program_of_the_page(tmp_path: Path) -> None:
    program = next(block for block in blocks(ROOT / "docs" / "deepspeed.md") if block.info == "ranks=4")
    (tmp_path / "train.py").write_text(program.text)
    found = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    found |= {
        "PYTHONPATH": str(DEEPSPEED),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    command = [sys.executable, str(DEEPSPEED / "bin" / "deepspeed"), "--num_gpus", "4", "train.py"]
    done = subprocess.run(command, capture_output=True, text=True, env=found, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "True" in done.stdout.splitlines()
