"""Asks Slurm on behalf of launchers whether it takes a batch script, to run it, and what it knows of a job."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from megasched import slurm
from megasched.errors import ConfigError
from megasched.slurm import NoAnswerError, call

REMEDY = "run this where Slurm's programs are, on a login node; --dry-run prints the script anywhere"
JOB_ID = re.compile(r"\d+")
PART_OF_A_JOB = re.compile(r"\d+(_(\d+|\[.*\])|\+\d+)")
# Fields whose value is the rest of the line: it may have spaces in it.
TO_THE_END = {
    *("JobName", "Command", "WorkDir", "StdErr", "StdIn", "StdOut"),
    *("Comment", "AdminComment", "SubmitLine"),
}
NOTHING = {"(null)", "None", "N/A", "Unknown"}
FIELD = re.compile(r"(?:^|\s)(?P<name>[A-Za-z][\w/:]*)=(?P<value>\S*)")


@dataclass(frozen=True)
class SlurmJob:
    """Describes a job as Slurm sees it.

    Attributes:
        job_id: the job's number, as digits.
        name: name of the job.
        state: Slurm's word, e.g. ``RUNNING``.
        reason: why it waits or has ended; empty for none.
        restarts: how often it was requeued.
        nodes: e.g. ``node[1-4]``; empty while it waits.
        start, end: times of its current run, expected ones while it waits or runs; None if unknown.
        time_limit: e.g. ``1-00:00:00``.
        command: the batch script with its arguments.
        output: path of the batch script's output.
    """

    job_id: str
    name: str
    state: str
    reason: str = ""
    restarts: int = 0
    nodes: str = ""
    start: datetime | None = None
    end: datetime | None = None
    time_limit: str = ""
    command: str = ""
    output: str = ""

    @property
    def script(self) -> Path | None:
        """Returns the path of the batch script; None where it is no file that is still there."""
        words = self.command.split(" ")
        # Slurm puts the arguments behind it and quotes nothing: the longest beginning that is a file.
        for count in range(len(words), 0, -1):
            path = Path(" ".join(words[:count]))
            if words[0] and path.is_file():
                return path
        return None


def ask_slurm(job_id: str) -> SlurmJob:
    """Returns what Slurm knows about a job.

    Raises:
        ConfigError: Slurm's programs are missing or can't reach Slurm, Slurm does not know the job, or the job is
            an array or heterogeneous.
    """
    if PART_OF_A_JOB.fullmatch(job_id):
        raise ConfigError(f"{job_id}: arrays and heterogeneous jobs are not supported; pass one run's folder")
    try:
        found = call(["scontrol", "show", "job", job_id])
    except NoAnswerError as error:
        raise ConfigError(f"job {job_id}: scontrol gives no answer ({error}); pass the run's folder") from error
    except ConfigError as error:
        raise ConfigError(
            f"job {job_id}: there is no scontrol here; run this where Slurm is, or pass the run's folder"
        ) from error
    if "Invalid job id" in found.err:
        raise ConfigError(
            f"job {job_id}: Slurm does not know it (any more: it forgets jobs some minutes after their end); "
            "pass the run's folder"
        )
    if found.status:
        told = found.err.strip().splitlines() or [f"exit status {found.status}"]
        raise ConfigError(f"job {job_id}: scontrol failed ({told[-1]}); pass the run's folder")
    return parse_job(found.out)


def parse_job(text: str) -> SlurmJob:
    """Parses one job, as ``scontrol show job`` prints it.

    Raises:
        ConfigError: it is a job array or a heterogeneous job.
    """
    fields: dict[str, str] = {}
    for line in text.splitlines():
        for field in FIELD.finditer(line):
            name, value = field["name"], field["value"]
            if name in TO_THE_END:
                fields[name] = line[field.start("value") :].strip()
                break
            fields[name] = value
    fields = {name: "" if value in NOTHING else value for name, value in fields.items()}
    for name, kind in (("ArrayJobId", "a job array"), ("HetJobId", "a heterogeneous job")):
        if name in fields:
            raise ConfigError(f"job {fields[name]} is {kind}, which is not supported; pass one run's folder")
    return SlurmJob(
        job_id=fields.get("JobId", ""),
        name=fields.get("JobName", ""),
        state=fields.get("JobState", ""),
        reason=fields.get("Reason", ""),
        restarts=int(fields.get("Restarts", 0)),
        nodes=fields.get("NodeList", ""),
        start=_time(fields.get("StartTime", "")),
        end=_time(fields.get("EndTime", "")),
        time_limit=fields.get("TimeLimit", ""),
        command=fields.get("Command", ""),
        output=fields.get("StdOut", ""),
    )


def _time(text: str) -> datetime | None:
    return datetime.fromisoformat(text) if text else None


def refused_by_slurm(script: Path) -> str:
    """Returns why ``sbatch`` would not take a script now; empty if it would.

    Raises:
        ConfigError: Slurm's programs are missing, or Slurm does not answer.
    """
    found = slurm.submit(["--test-only", str(script)], remedy=REMEDY)
    return found.message if found.status else ""


def submit(script: Path, *options: str) -> str:
    """Submits a script, and returns the job's id.

    Args:
        options: options of ``sbatch``, before those in the script.

    Raises:
        ConfigError: Slurm's programs are missing, or Slurm refuses the script.
    """
    found = slurm.submit(["--parsable", *options, str(script)], remedy=REMEDY)
    if found.status:
        raise ConfigError(f"sbatch refused {script}: {found.message}")
    return slurm.job_id(found)
