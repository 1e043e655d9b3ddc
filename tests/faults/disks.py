"""Small file systems that are full, or can't be written to."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def resize(disk: Path, free: int) -> None:
    """Leaves so many bytes free on it."""
    status = os.statvfs(disk)
    used = (status.f_blocks - status.f_bfree) * status.f_frsize
    subprocess.run(["mount", "-o", f"remount,size={used + free}", disk], check=True)


@contextmanager
def read_only(disk: Path) -> Iterator[None]:
    """Nobody can write there, root no more than others."""
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    try:
        yield
    finally:
        subprocess.run(["mount", "-o", "remount,rw", disk], check=True)
