"""Takes a job to its script in the run's folder, and into Slurm's queue."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from megasched.errors import ConfigError
from megasched.launch.jobs.checks import Checks, Prepared, look_over
from megasched.launch.jobs.job_script import write_script
from megasched.launch.jobs.words import refuse_unusable
from megasched.launch.run_folder import RunFolder
from megasched.launch.slurm.client import refused_by_slurm, submit
from megasched.launch.slurm.script import SlurmJob, render


def prepare(job: SlurmJob, checks: Checks, *, ask_slurm: bool = True) -> Prepared[SlurmJob]:
    """Renders the script and checks everything; writes nothing.

    Args:
        ask_slurm: whether to ask if the cluster can run it.

    Raises:
        ConfigError: the job has problems; the message lists all of them.
    """
    refuse_unusable(job)
    text = render(job)
    ask = partial(_refused, text) if ask_slurm else None
    return look_over(job, text, checks, ask=ask, intent="submitted")


def _refused(text: str) -> Iterator[str]:
    """Yields why the cluster can't run a script, if it can't."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "job.sbatch"
        script.write_text(text, encoding="utf-8")
        if why := refused_by_slurm(script):
            yield f"Slurm: {why}"


def write(prepared: Prepared[SlurmJob]) -> Path:
    """Writes the script into the run's folder, keeps an earlier one beside it, and returns the path."""
    folder = RunFolder(prepared.job.run_folder)
    folder.logs.mkdir(parents=True, exist_ok=True)
    write_script(folder.script, prepared.text, prepared.job, prepared.facts)
    return folder.script


def enqueue(folder: RunFolder, times: int = 1) -> list[str]:
    """Submits a run's script, and returns the ids of the jobs.

    Args:
        folder: folder of the run, which has the script.
        times: number of jobs; of several, each begins when the one before has ended, whatever its end (singleton).

    Raises:
        ConfigError: Slurm refuses the script; the message names the jobs of a chain that it has taken.
    """
    options = ["--dependency=singleton"] if times > 1 else []
    jobs: list[str] = []
    for _ in range(times):
        try:
            jobs.append(submit(folder.script, *options))
        except ConfigError as error:
            if not jobs:
                raise
            taken = f"{len(jobs)} of {times} are in the queue ({', '.join(jobs)}): `scancel` ends them"
            raise ConfigError(f"{error}\n{taken}") from error
        folder.describe(folder.described() | {"jobs": jobs})
    return jobs
