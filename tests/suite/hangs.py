"""A test that does not end fails by name, with the stacks of all that it has started.

pytest-timeout keeps the time (``timeout`` in pyproject.toml); what it prints when that is over is the test's own
process alone, and most of ours wait for others: for ranks, trainers, jobs of Slurm.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import sysconfig
from collections.abc import Iterator
from types import FrameType
from typing import Any

import psutil
import pytest
import pytest_timeout

SLOW_SECONDS = 1200  # of a test that is marked slow
MOST_PROCESSES = 24  # whose stacks are shown


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW_SECONDS))


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> bool:
    def fail(signum: int, frame: FrameType | None) -> None:
        __tracebackhide__ = True
        if not pytest_timeout.is_debugging():
            pytest.fail(f"no end after {settings.timeout:g} s\n{stacks()}")

    def cancel() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)

    item.cancel_timeout = cancel  # where pytest-timeout looks for it
    signal.signal(signal.SIGALRM, fail)
    signal.setitimer(signal.ITIMER_REAL, settings.timeout)
    return True


def stacks() -> str:
    """Where each process below this one stands now."""
    return "\n".join(_stacks(psutil.Process().children(recursive=True)[:MOST_PROCESSES]))


def _stacks(processes: list[psutil.Process]) -> Iterator[str]:
    program = shutil.which("py-spy", path=sysconfig.get_path("scripts"))
    for process in processes:
        try:
            yield f"--- process {process.pid}: {' '.join(process.cmdline())[:300]}"
            if program and "python" in process.name():
                dump = [program, "dump", "--pid", str(process.pid)]
                found = subprocess.run(dump, capture_output=True, text=True, timeout=20, check=False)
                yield found.stdout or found.stderr
        except (psutil.Error, subprocess.TimeoutExpired) as error:
            yield f"    {error}"
