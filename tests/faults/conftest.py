"""A disk for the tests of faults."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def disk(tmp_path) -> Iterator[Path]:
    """A file system of its own, of 8 MB."""
    if os.geteuid():
        pytest.skip("only root can mount a small file system")
    folder = tmp_path / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", folder], check=True)
    yield folder
    # Lazily: the traceback of an expected error may still hold a file open.
    subprocess.run(["umount", "--lazy", folder], check=True)
