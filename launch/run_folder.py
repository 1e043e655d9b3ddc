"""Defines where a run keeps its files, and finds the logs that it has left.

::

    RUN/
      job.sbatch                              the batch script of Slurm
      job.sh                                  the script that torchrun's launcher runs on each host
      job.json                                the launcher's description of the job
      logs/<name>.log                         output of the batch script, over all its restarts
      logs/<name>-<restart>/node-<n>.log      output of the ranks of one node

``<name>`` is Slurm's job id, or the name of another launcher (``torchrun``, ``local``); ``<restart>`` counts
from 0.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megasched.errors import ConfigError
from megasched.files import write_whole
from megasched.reading.files import Expected, is_regular
from megasched.reading.json_file import read_json

ATTEMPT = re.compile(r"(?P<name>.+)-(?P<restart>\d+)")
DESCRIPTION = Expected("what the launcher of a run knew, in JSON; status works without the file")
NODE = re.compile(r"node-(?P<node>\d+)\.log")
# What people call the output of a job: --output of their own, and sbatch's slurm-<jobid>.out.
SUFFIXES = (".log", ".out")


@dataclass(frozen=True)
class Attempt:
    """Represents one start of a job's processes: the first, or a restart.

    Attributes:
        name: name of the job.
        restart: number of the restart; 0 for the first start.
        logs: logs of its nodes, or the one log of a run on one machine.
    """

    name: str
    restart: int
    logs: tuple[Path, ...]


@dataclass(frozen=True)
class RunFolder:
    """Gives the paths in the folder of a run, by the names that the launchers use."""

    path: Path

    @property
    def script(self) -> Path:
        """Returns the path of the batch script."""
        return self.path / "job.sbatch"

    @property
    def host_script(self) -> Path:
        """Returns the path of the script that runs on each host where there is no Slurm."""
        return self.path / "job.sh"

    @property
    def description(self) -> Path:
        """Returns the path of the launcher's description of the job, in JSON."""
        return self.path / "job.json"

    def describe(self, known: Mapping[str, Any]) -> None:
        """Writes the launcher's description of the job: how it was asked for, and the ids it has (``jobs``)."""
        write_whole(self.description, [json.dumps(known, indent=2), "\n"])

    def described(self) -> dict[str, Any]:
        """Returns the launcher's description of the job; empty where no launcher has made the folder."""
        if not os.path.lexists(self.description):
            return {}
        return read_json(self.description, DESCRIPTION, {"jobs?": [str | int]})

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def batch_log(self, name: str) -> Path:
        """Returns the path of the batch script's output."""
        return self.logs / f"{name}.log"

    def attempt_folder(self, name: str, restart: int) -> Path:
        """Returns the folder into which the nodes of one start write."""
        return self.logs / f"{name}-{restart}"

    def node_log(self, name: str, restart: int, node: int) -> Path:
        """Returns the path of the output of one node's ranks; ``node`` counts the job's nodes from 0."""
        return self.attempt_folder(name, restart) / f"node-{node}.log"

    def begin_attempt(self, name: str) -> int:
        """Makes the folder of the next start of a job, and returns the start's number."""
        found = [ATTEMPT.fullmatch(folder.name) for folder in self.logs.glob("*-*/")]
        numbers = [int(match["restart"]) for match in found if match and match["name"] == name]
        restart = max(numbers, default=-1) + 1
        while True:  # two may begin at once
            try:
                self.attempt_folder(name, restart).mkdir(parents=True)
            except FileExistsError:
                restart += 1
            else:
                return restart

    def attempts(self) -> list[Attempt]:
        """Returns the starts that have left logs, the oldest first; those of the job that wrote last come last."""
        found = []
        for folder in self.logs.glob("*-*/"):
            match = ATTEMPT.fullmatch(folder.name)
            logs = sorted(
                (path for path in folder.glob("node-*.log") if NODE.fullmatch(path.name) and is_regular(path)),
                key=_node,
            )
            if match and logs:
                found.append(Attempt(match["name"], int(match["restart"]), tuple(logs)))
        written = {each.name: 0.0 for each in found}
        for each in found:
            written[each.name] = max(written[each.name], *map(_modified, each.logs))
        return sorted(found, key=lambda each: (written[each.name], len(each.name), each.name, each.restart))


@dataclass(frozen=True)
class RunLogs:
    """Holds the paths of a run's logs.

    Attributes:
        path: the folder or log that was asked for.
        attempts: the oldest first; at least one.
        batch_logs: outputs of batch scripts, beside those of their attempts.
    """

    path: Path
    attempts: tuple[Attempt, ...]
    batch_logs: tuple[Path, ...] = ()

    @property
    def paths(self) -> list[Path]:
        """Returns all logs, those of the newest attempt last."""
        return [*self.batch_logs, *(path for attempt in self.attempts for path in attempt.logs)]


def find_logs(path: Path) -> RunLogs:
    """Returns the logs of a run.

    Args:
        path: a run's folder, another folder with ``*.log`` or ``*.out`` files of one run, or one log.

    Raises:
        ConfigError: there are no logs.
    """
    if is_regular(path):
        return RunLogs(path, (Attempt(path.stem, 0, (path,)),))
    if not path.is_dir():
        raise ConfigError(f"{path}: no such file or folder; name a run's folder, one of its logs, or a Slurm job")
    folder = RunFolder(path)
    attempts, batch_logs = folder.attempts(), sorted(_logs_in(folder.logs), key=_modified)
    if attempts:
        return RunLogs(path, tuple(attempts), tuple(batch_logs))
    if batch_logs:
        return RunLogs(path, tuple(Attempt(log.stem, 0, (log,)) for log in batch_logs))
    logs = sorted(_logs_in(path), key=_modified)
    if not logs:
        raise ConfigError(
            f"{path}: there are no logs (*.log, *.out), neither in the folder nor in logs/. A job that waits "
            "has none yet: `megasched status JOBID` tells what Slurm knows"
        )
    return RunLogs(path, (Attempt(logs[-1].stem, 0, tuple(logs)),))


def _logs_in(folder: Path) -> list[Path]:
    return [path for path in folder.glob("*") if path.suffix in SUFFIXES and is_regular(path)]


def _node(path: Path) -> int:
    match = NODE.fullmatch(path.name)
    assert match is not None
    return int(match["node"])


def _modified(path: Path) -> float:
    return path.stat().st_mtime
