"""Slurm's own words on a batch script, and its submission."""

from __future__ import annotations

from pathlib import Path

from megasched import slurm
from megasched.errors import ConfigError

REMEDY = "run this where Slurm's programs are, on a login node; --dry-run prints the script anywhere"


def refused_by_slurm(script: Path) -> str:
    """Why ``sbatch`` would not take a script now; empty if it would.

    Raises:
        ConfigError: Slurm's programs are missing, or it does not answer.
    """
    found = slurm.submit(["--test-only", str(script)], remedy=REMEDY)
    return found.message if found.status else ""


def submit(script: Path, *options: str) -> str:
    """Submits; returns the job's id.

    Args:
        options: of ``sbatch``, before those in the script.

    Raises:
        ConfigError: Slurm's programs are missing, or it is refused.
    """
    found = slurm.submit(["--parsable", *options, str(script)], remedy=REMEDY)
    if found.status:
        raise ConfigError(f"sbatch refused {script}: {found.message}")
    return slurm.job_id(found)
