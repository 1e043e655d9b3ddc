"""From a job to its script in the run's folder, and into Slurm's queue."""

from __future__ import annotations

import tempfile
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from megasched.errors import ConfigError
from megasched.files import write_whole
from megasched.launch.checks import Checked, check
from megasched.launch.run_folder import RunFolder
from megasched.launch.slurm.script import SlurmJob, render
from megasched.launch.slurm.submit import refused_by_slurm, submit


@dataclass(frozen=True)
class Prepared:
    """A job that can be submitted.

    Attributes:
        text: its script.
        checked: what the check has found; None where there was none.
    """

    job: SlurmJob
    text: str
    checked: Checked | None = None


def prepare(job: SlurmJob, *, gpu: str | None = None, check_run: bool = True, ask_slurm: bool = True) -> Prepared:
    """Makes the script and looks everything over; nothing is written.

    Args:
        gpu: for the memory check, as ``megasched plan --gpu`` takes it.
        check_run: begin the run once here, up to training.
        ask_slurm: whether the cluster can run it.

    Raises:
        ConfigError: with everything that is wrong.
    """
    text = render(job)
    checked = check(job.script, job.flags, job.world_size, gpu) if check_run else None
    problems = list(checked.problems) if checked else []
    if ask_slurm:
        with tempfile.TemporaryDirectory() as folder:
            script = Path(folder) / "job.sbatch"
            script.write_text(text, encoding="utf-8")
            if why := refused_by_slurm(script):
                problems.append(f"Slurm: {why}")
    if problems:
        raise ConfigError(told(problems))
    return Prepared(job, text, checked)


def told(problems: list[str]) -> str:
    """All that is wrong with a job, in one text."""
    head = "this job would fail, and was not submitted:"
    return "\n".join([head, *(f"  - {one}".replace("\n", "\n    ") for one in problems)])


def write(prepared: Prepared) -> Path:
    """Puts the script into the run's folder; returns its path. A script that was there is kept beside it."""
    folder = RunFolder(prepared.job.run_folder)
    folder.logs.mkdir(parents=True, exist_ok=True)
    if folder.script.exists() and folder.script.read_text(encoding="utf-8") != prepared.text:
        number = 1 + sum(1 for _ in folder.path.glob(f"{folder.script.name}.*"))
        folder.script.rename(folder.script.with_name(f"{folder.script.name}.{number}"))
    write_whole(folder.script, [prepared.text])
    folder.script.chmod(0o755)
    job = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(prepared.job).items()}
    facts = prepared.checked.facts if prepared.checked else {}
    written = datetime.now(UTC).isoformat(timespec="seconds")
    folder.describe({"written": written, "job": job, "facts": facts, "jobs": []})
    return folder.script


def enqueue(folder: RunFolder, times: int = 1) -> list[str]:
    """Submits a run's script; returns the ids of the jobs.

    Args:
        folder: in which the script was written.
        times: how often; of several, each begins when the one before has ended, whatever its end (singleton).

    Raises:
        ConfigError: Slurm refuses it.
    """
    options = ["--dependency=singleton"] if times > 1 else []
    jobs = [submit(folder.script, *options) for _ in range(times)]
    folder.describe(folder.described() | {"jobs": jobs})
    return jobs
