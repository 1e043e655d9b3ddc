"""A job whose script is made and which nothing speaks against, whoever starts it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from megasched.errors import ConfigError
from megasched.launch.jobs.checks import Checked, check, told
from megasched.launch.slurm.script import SlurmJob
from megasched.launch.torchrun.script import TorchrunJob


@dataclass(frozen=True)
class Prepared[Job: (SlurmJob, TorchrunJob)]:
    """A job that can be started.

    Attributes:
        text: its script.
        checked: what the check has found; None where there was none.
    """

    job: Job
    text: str
    checked: Checked | None = None

    @property
    def facts(self) -> dict[str, Any]:
        """What the check has found the job to be; empty where there was none."""
        return self.checked.facts if self.checked else {}


def look_over[Job: (SlurmJob, TorchrunJob)](
    job: Job,
    text: str,
    *,
    gpu: str | None,
    check_run: bool,
    ask: Callable[[], Iterable[str]] | None,
    intent: str,
) -> Prepared[Job]:
    """Checks a job and asks those that are to run it; nothing is written.

    Args:
        text: the job's script.
        gpu: for the memory check, as ``megasched plan --gpu`` takes it.
        check_run: begin the run once here, up to training.
        ask: gives what speaks against it where it is to run.
        intent: what is not done with a job that would fail, e.g. ``"started"``.

    Raises:
        ConfigError: with everything that is wrong.
    """
    checked = check(job.script, job.flags, job.world_size, gpu) if check_run else None
    problems = [*(checked.problems if checked else ()), *(ask() if ask else ())]
    if problems:
        raise ConfigError(told(problems, intent))
    return Prepared(job, text, checked)
