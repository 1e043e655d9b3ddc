"""The commands of docs/families.md, one after the other, on the models that its script makes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.families.example import SCRIPT
from tests.pages.blocks import blocks

PAGE = SCRIPT.parents[2] / "docs" / "families.md"
FIGURES = re.compile(r"iteration +(\d).* lm loss: (\S+) .* grad norm: (\S+) ")

pytestmark = pytest.mark.slow


def test_they_print_what_the_page_shows(tmp_path):
    found = blocks(PAGE)
    commands = [index for index, block in enumerate(found) if block.language == "bash"]
    assert len(commands) == 4
    assert figures(PAGE.read_text()).shape == (12, 3)
    for index in commands:
        block, after = found[index], found[index + 1]
        printed = run(block.text.replace("examples/families/make.py", str(SCRIPT)), tmp_path)
        if after.language == "text" and after.follows:
            assert figures(printed) == pytest.approx(figures(after.text), rel=1e-4)
            flags = [line for line in after.text.splitlines() if " ....." in line]
            assert set(flags) <= set(printed.splitlines())


def figures(text: str) -> np.ndarray:
    """Of each iteration its number, the loss and the norm of the gradients."""
    return np.array([[float(figure) for figure in found] for found in FIGURES.findall(text)])


def run(command: str, folder: Path) -> str:
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": programs, "OMP_NUM_THREADS": "1"}
    options = {"shell": True, "cwd": folder, "env": environment, "capture_output": True, "text": True}
    done = subprocess.run(f"set -e\n{command}", timeout=300, check=False, **options)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout
