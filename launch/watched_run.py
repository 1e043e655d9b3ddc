"""Runs the ranks of a job as a child process, keeps its output in a file, and leaves none of them behind."""

from __future__ import annotations

import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

from megasched.files import named
from megasched.reading.log_lines import log_lines
from megasched.trainer.run_failure import ERROR, FAILED

# torchrun itself waits 30 s for its ranks before it kills them; killed earlier, it would leave them running.
SECONDS_TO_STOP = 40

INTERRUPTED = 130


def run_watched(
    command: Sequence[str], *, env: Mapping[str, str], log_path: Path, on_line: Callable[[str], None]
) -> int:
    """Runs ``command`` to its end, with stdout and stderr written to ``log_path`` and passed on line by line.

    Ctrl-C and SIGTERM end the command, and with it the ranks that it started.

    Args:
        command: the launcher, e.g. torchrun, with its arguments.
        env: the whole environment.
        log_path: file for the output; overwritten.
        on_line: called with each line as it comes, without its line end.

    Returns:
        The exit code; `INTERRUPTED` (130) after Ctrl-C or SIGTERM.
    """
    with sigterm_as_interrupt():
        # A session of its own: Ctrl-C reaches this process only, which then ends the launcher in good order.
        process = subprocess.Popen(
            list(command),
            env=dict(env),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            with named(log_path), log_path.open("w") as log:
                for line in process.stdout:
                    log.write(line)
                    log.flush()
                    on_line(line.rstrip("\n"))
            return process.wait()
        except KeyboardInterrupt:
            return INTERRUPTED
        finally:
            stop(process)


@contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """Runs its body with SIGTERM raising ``KeyboardInterrupt`` in the main thread, as Ctrl-C does."""
    previous = signal.signal(signal.SIGTERM, _as_interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def stop(process: subprocess.Popen[str]) -> None:
    """Ends a launcher and its ranks; does nothing when the launcher has ended by itself."""
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGTERM)
    end = time.monotonic() + SECONDS_TO_STOP
    while process.poll() is None and time.monotonic() < end:
        # Reading on, so that a rank blocked on a full pipe can come to its end.
        _discard(process)
    if process.poll() is None:
        process.kill()
        process.wait()


def tail(path: Path, lines: int = 40) -> str:
    """Returns the last lines of a file."""
    return "".join(deque(log_lines(path), maxlen=lines)).rstrip("\n")


def last_error(path: Path) -> Iterator[str]:
    """Yields the error with which the log of a run ends, if that is one of megasched's own (`run_failure`)."""
    lines = tail(path).splitlines()
    begun = [number for number, line in enumerate(lines) if line.startswith((ERROR, FAILED))]
    if begun:
        yield "\n".join(lines[begun[-1] :])


def _discard(process: subprocess.Popen[str]) -> None:
    try:
        process.communicate(timeout=0.5)
    except subprocess.TimeoutExpired:
        return


def _as_interrupt(signum: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt
