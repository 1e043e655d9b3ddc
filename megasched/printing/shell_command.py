"""Spells commands of megasched as they work in a fresh shell, where no environment is active."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path


def short_path(path: str | Path) -> str:
    """Returns an absolute path relative to the working directory where it lies below it; else as it is."""
    path, here = Path(path), Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


def python() -> str:
    """Returns the interpreter that runs, as a short path."""
    return short_path(sys.executable)


def program() -> list[str]:
    """Returns the words that call this installation: ``megasched`` if that is the one on PATH, else its Python."""
    found = shutil.which("megasched")
    same = found is not None and Path(found).parent.samefile(Path(sys.executable).parent)
    return ["megasched"] if same else [python(), "-m", "megasched"]


def shell_command(*words: str) -> str:
    """Returns a command of megasched as text, e.g. ``.venv/bin/python -m megasched status runs/llama``."""
    return shlex.join([*program(), *(os.fspath(word) for word in words)])
