"""Checks a whole job on the login node, so that problems are known before 64 GPUs are held."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from megasched.errors import ConfigError, did_you_mean
from megasched.launch.slurm.script import SlurmJob
from megasched.launch.torchrun.script import TorchrunJob
from megasched.planner.hardware.hardware import GIB, Hardware, load_hardware
from megasched.reading.files import Expected
from megasched.reading.json_file import read_json

SECONDS = 600
FOUND = Expected("what the check of a job has found")
# Megatron writes a checkpoint before it removes an older one.
CHECKPOINTS = 2
# What can be waived by its name, each with what it looks at.
CHECKS = {
    "run": "the run, begun on this machine up to training",
    "memory": "the memory of a rank, against --gpu",
    "disk": "room for two checkpoints at --save, on this machine",
    "cluster": "what Slurm, or the hosts, say to the job",
}


@dataclass(frozen=True)
class Checks:
    """Says how a job is checked.

    Attributes:
        gpu: type of GPU for the memory check, as ``megasched plan --gpu`` takes it.
        check_run: whether to begin the run once on this machine, up to training.
        waived: names of ``CHECKS`` whose problems refuse nothing; the cluster is not even asked then.
    """

    gpu: str | None = None
    check_run: bool = True
    waived: Collection[str] = ()


@dataclass(frozen=True)
class Checked:
    """Holds the result of a check.

    Attributes:
        problems: why the job can't run; empty if it can.
        warnings: what may go wrong later.
        facts: facts about the job, from ``check_process``.
    """

    problems: tuple[str, ...]
    warnings: tuple[str, ...] = ()
    facts: dict[str, Any] = field(default_factory=dict)


def check_waived(names: Collection[str]) -> None:
    """Checks the names of waived checks.

    Raises:
        ConfigError: there is no such check.
    """
    for name in names:
        if name not in CHECKS:
            meant = did_you_mean(get_close_matches(name, CHECKS)) or "."
            told = "; ".join(f"{check}: {what}" for check, what in CHECKS.items())
            raise ConfigError(f"--waive {name}: there is no such check{meant} There are {told}")


def check(
    script: str,
    flags: Sequence[str],
    world_size: int,
    gpu: str | None = None,
    waived: Collection[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Checked:
    """Begins the run in a separate process, as rank 0 of ``world_size``, and checks what the run needs.

    Args:
        environment: further variables of the ranks.
        waived: names of ``CHECKS`` whose problems are warnings.
        gpu: a type or TOML file as ``megasched plan --gpu`` takes it; without one memory is reported, not judged.

    Raises:
        ConfigError: there is no such GPU, or the process did not end or gave no result.
    """
    hardware: Hardware | None = load_hardware(gpu) if gpu is not None else None
    facts = _run(script, flags, world_size, environment or {})
    found, warnings = {"run": list(facts.pop("problems"))}, list(facts.pop("warnings"))
    if "memory" in facts and hardware is not None:
        most, limit = max(facts["memory"]), hardware.usable_bytes
        if most > limit:
            found["memory"] = [
                f"pipeline rank {facts['memory'].index(most)} needs {most / GIB:.1f} GiB, and "
                f"{limit / GIB:.1f} GiB of a {hardware.name} fit one; `megasched plan` finds layouts that fit"
            ]
    warnings += [f"not checked without a GPU's software: {flag}" for flag in facts.pop("unchecked", ())]
    if why := facts.get("memory_unknown"):
        warnings.append(f"memory is not known: {why}")
    if facts.get("save"):
        found["disk"] = _no_room(Path(facts["save"]), facts["checkpoint_bytes"])
    elif "save" in facts:
        warnings.append("there is no --save: a restart will begin anew, and nothing is kept at the end")
    warnings += [problem for name, problems in found.items() if name in waived for problem in problems]
    problems = [problem for name, problems in found.items() if name not in waived for problem in problems]
    return Checked(tuple(problems), tuple(warnings), facts)


def failure_message(problems: Sequence[str], intent: str = "started") -> str:
    """Returns all problems of a job in one text; ``intent`` is what was not done."""
    head = f"this job would fail, and was not {intent}:"
    return "\n".join([head, *(f"  - {one}".replace("\n", "\n    ") for one in problems)])


@dataclass(frozen=True)
class Prepared[Job: (SlurmJob, TorchrunJob)]:
    """Represents a job that can be started.

    Attributes:
        text: text of its script.
        checked: result of the check; None where there was none.
    """

    job: Job
    text: str
    checked: Checked | None = None

    @property
    def facts(self) -> dict[str, Any]:
        """Returns the facts that the check has found about the job; empty where there was none."""
        return self.checked.facts if self.checked else {}


def look_over[Job: (SlurmJob, TorchrunJob)](
    job: Job,
    text: str,
    checks: Checks,
    *,
    ask: Callable[[], Iterable[str]] | None,
    intent: str,
) -> Prepared[Job]:
    """Checks a job and asks the cluster or hosts that are to run it; writes nothing.

    Args:
        text: the job's script.
        ask: returns the problems of the cluster or hosts with the job.
        intent: what is not done with a job that would fail, e.g. ``"started"``.

    Raises:
        ConfigError: the job has problems; the message lists all of them.
    """
    checked = None
    if checks.check_run:
        checked = check(job.script, job.flags, job.world_size, checks.gpu, checks.waived, job.environment)
    problems = [*checked.problems] if checked else []
    problems += ask() if ask and "cluster" not in checks.waived else ()
    if problems:
        raise ConfigError(failure_message(problems, intent))
    return Prepared(job, text, checked)


def _run(script: str, flags: Sequence[str], world_size: int, environment: Mapping[str, str]) -> dict[str, Any]:
    """Runs ``check_process``, and returns what it found."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        own = {"WORLD_SIZE": str(world_size), "RANK": "0", "LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": ""}
        command = [sys.executable, "-m", "megasched.launch.jobs.check_process", str(out), script, *flags]
        try:
            done = subprocess.run(
                command,
                env={**os.environ, **environment, "OMP_NUM_THREADS": "1", **own},
                capture_output=True,
                text=True,
                errors="replace",
                check=False,
                timeout=SECONDS,
            )
        except subprocess.TimeoutExpired as error:
            what = f"the check of the command took more than {SECONDS} s; --no-check starts it without"
            raise ConfigError(what) from error
        if not out.is_file():
            raise ConfigError(
                f"the check of the command ended with status {done.returncode} and without a result; --no-check "
                f"starts it without. The last it said:\n{_last_lines(done.stderr)}"
            )
        found = read_json(out, FOUND, {"problems": [str], "warnings": [str]})
    found["problems"] = [problem or _usage_error(done.stderr) for problem in found["problems"]]
    return found


def _usage_error(stderr: str) -> str:
    """Returns argparse's last line without the program's name before it."""
    errors = [line.partition("error: ")[2] for line in stderr.splitlines() if "error: " in line]
    return errors[-1] if errors else _last_lines(stderr)


def _last_lines(text: str, count: int = 5) -> str:
    return "\n".join(f"    {line}" for line in text.strip().splitlines()[-count:])


def _no_room(save: Path, size: int) -> list[str]:
    """Returns the problems of the folder for checkpoints: it can't be written to, or has too little room."""
    place = save.absolute()
    while not place.exists():
        place = place.parent
    if not place.is_dir() or not os.access(place, os.W_OK):
        return [f"--save {save}: {place} can't be written to"]
    from rich.filesize import decimal

    free = shutil.disk_usage(place).free
    if free >= CHECKPOINTS * size:
        return []
    return [
        f"--save {save}: a checkpoint takes {decimal(size)}, and two of them must find room while an old one is "
        f"replaced; {decimal(free)} are free at {place}"
    ]
