"""Runs one command for each node, keeps their logs, ends all when one fails, and leaves none behind.

The commands end when their stdin does (``job.sh.jinja`` sees to it). That reaches ranks behind ssh, which no
signal of this machine reaches, and it works however this process ends.
"""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Self

# A script on a host kills what has not ended after 40 s.
SECONDS_TO_STOP = 60
# Of the command and of the numbers: see `Nodes.status`.
CERTAIN = (2, 17)


class Nodes:
    """Runs the commands of one start; a context manager that ends them when it is left."""

    def __init__(
        self,
        commands: Iterable[tuple[Sequence[str], Path]],
        *,
        env: Mapping[str, str],
        on_line: Callable[[str], None],
    ) -> None:
        """Prepares the commands, which start when the context is entered.

        Args:
            commands: each command with the file for its stdout and stderr.
            env: the whole environment of each command.
            on_line: called with each line of any command, without its end, in a thread of the command's. What is
                not UTF-8 comes as surrogates.
        """
        self._commands, self._env, self._on_line = list(commands), dict(env), on_line
        self._processes: list[subprocess.Popen[bytes]] = []
        self._readers: list[threading.Thread] = []
        self._ends: SimpleQueue[tuple[int, int]] = SimpleQueue()
        # The node that failed first, and its status.
        self.failed: tuple[int, int] | None = None

    def __enter__(self) -> Self:
        try:
            for command, log in self._commands:
                self._start(command, log)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def _start(self, command: Sequence[str], log: Path) -> None:
        # Sessions of their own: Ctrl-C reaches this process only, which then ends them in good order.
        process = subprocess.Popen(
            command,
            env=self._env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,
            start_new_session=True,
        )
        reader = threading.Thread(target=self._read, args=(len(self._processes), process, log), daemon=True)
        self._processes.append(process)
        self._readers.append(reader)
        reader.start()

    def _read(self, node: int, process: subprocess.Popen[bytes], log: Path) -> None:
        status = 1  # where the log can't be written
        try:
            with log.open("wb") as file, open(process.stdout.fileno(), "rb", closefd=False) as lines:
                for line in lines:
                    file.write(line)
                    file.flush()
                    self._on_line(line.decode(errors="surrogateescape").rstrip("\n"))
            status = process.wait()
            status = status if status >= 0 else 128 - status
        finally:
            self._ends.put((node, status))

    def wait(self) -> None:
        """Waits until all commands have ended well, or one has failed."""
        for _ in self._processes:
            node, status = self._ends.get()
            if status:
                self.failed = node, status
                return

    def ask_to_save(self) -> None:
        """Asks the ranks to save and end."""
        for process in self._processes:
            with suppress(OSError, ValueError):  # that one has ended, or is being ended
                process.stdin.write(b"save\n")

    @property
    def status(self) -> int:
        """Returns the status of all commands, once they have ended.

        It is that of the first failure, unless another one is `CERTAIN`: when ranks fail together, hosts learn of
        it in any order.
        """
        if self.failed is None:
            return 0
        found = [process.returncode for process in self._processes]
        return next((status for status in found if status in CERTAIN), self.failed[1])

    def _end(self) -> None:
        for process in self._processes:
            process.stdin.close()
        end = time.monotonic() + SECONDS_TO_STOP
        try:
            for reader in self._readers:
                reader.join(max(0.0, end - time.monotonic()))
        finally:  # also after another Ctrl-C: what has its stdin ended goes on to end by itself
            for process in self._processes:
                process.kill()
                process.wait()
