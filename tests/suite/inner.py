"""A run of pytest inside a test: how the plugins of this folder are tested."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.process import ROOT


def run_pytest(folder: Path, plugin: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Runs the tests in a folder with one of our plugins, and none of our fixtures."""
    command = [sys.executable, "-m", "pytest", "-p", plugin, "-p", "no:cacheprovider", *options]
    return subprocess.run(
        [*command, f"--basetemp={folder / 'temp'}", str(folder)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
