"""Slurm's own words on a batch script, and its submission."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

from megasched.errors import ConfigError

SECONDS = 60


def refused_by_slurm(script: Path) -> str:
    """Why ``sbatch`` would not take a script now; empty if it would.

    Raises:
        ConfigError: Slurm's programs are missing.
    """
    found = _call(["sbatch", "--test-only", str(script)])
    return "" if found.returncode == 0 else _message(found)


def submit(script: Path, *options: str) -> str:
    """Submits; returns the job's id.

    Args:
        options: of ``sbatch``, before those in the script.

    Raises:
        ConfigError: Slurm's programs are missing, or it is refused.
    """
    found = _call(["sbatch", "--parsable", *options, str(script)])
    if found.returncode:
        raise ConfigError(f"sbatch refused {script}: {_message(found)}")
    return found.stdout.strip().partition(";")[0]


def _call(words: Sequence[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(words, capture_output=True, text=True, check=False, timeout=SECONDS)
    except OSError as error:
        raise ConfigError(
            f"{words[0]}: it can't be started ({error.strerror}). Run this where Slurm's programs are, on a login "
            "node; --dry-run prints the script anywhere"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"{words[0]} did not answer within {SECONDS} s: is slurmctld up?") from error


def _message(found: subprocess.CompletedProcess[str]) -> str:
    lines = [line.removeprefix("sbatch: ").removeprefix("error: ") for line in found.stderr.splitlines() if line]
    return "; ".join(lines) or f"status {found.returncode}"
