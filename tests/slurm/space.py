"""A set of Linux namespaces that lives and dies with one process."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

# Process 1 of a namespace inherits all orphans there (each slurmstepd is one), and has to wait for them.
REAP = "echo ready; while :; do sleep 3600 & wait; done"


class SpaceError(Exception):
    """The kernel did not give the namespaces."""


class Space:
    """Namespaces of their own for ``kinds``, and always for process ids, held by a process 1 that does nothing.

    When that process dies, the kernel kills all others in the namespace at once, also those in spaces within.

    Attributes:
        pid: of process 1, as the machine counts.
    """

    def __init__(self, kinds: Sequence[str], env: Mapping[str, str], before: Sequence[str] = ()) -> None:
        """
        Args:
            kinds: options of unshare without their dashes: ``net``, ``mount``, ``uts``.
            env: environment of the processes that hold it.
            before: a command that takes the rest as its arguments, e.g. ``Space.enter`` of the space around.

        Raises:
            SpaceError: it was refused.
        """
        unshare = ["unshare", *(f"--{kind}" for kind in kinds), "--pid", "--fork", "--kill-child", "--mount-proc"]
        self._holder = subprocess.Popen(
            [*before, *unshare, "bash", "-c", REAP],
            env=env,
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # Ctrl-C is for pytest, which then ends the space
        )
        assert self._holder.stdout is not None
        with self._holder.stdout as output:
            said = output.readline()
        if said != "ready\n":
            self._holder.wait()
            raise SpaceError(f"{' '.join(self._holder.args)}: {said.strip()}")
        self.pid = next(
            child.pid
            for child in psutil.Process(self._holder.pid).children(recursive=True)
            if _number(child.pid) == 1
        )

    def enter(self, *command: str) -> list[str]:
        """A command line that runs a command in here. The command starts in /."""
        return ["nsenter", f"--target={self.pid}", "--mount", "--net", "--uts", "--pid", *command]

    def end(self) -> None:
        """Kills all that is in here, and returns when nothing is left."""
        with suppress(psutil.NoSuchProcess):
            psutil.Process(self.pid).send_signal(signal.SIGKILL)
        self._holder.wait()


def _number(pid: int) -> int:
    """The id of a process as it sees itself."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("NSpid:")).split()[-1])
