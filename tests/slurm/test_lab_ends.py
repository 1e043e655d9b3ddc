"""However a lab ends, no process is left, and the machine is as it was, also while the lab runs."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.process import ROOT
from tests.slurm.config import Cluster
from tests.slurm.lab import Lab, processes

pytestmark = pytest.mark.slow  # of the tests' own tools

HANGS = """\
import time
from pathlib import Path

from tests.slurm.conftest import lab, slurm

def test_hangs(lab):
    script = lab.jobs / "sleeps.sh"
    script.write_text("#!/bin/bash\\nsrun sleep 600\\n")
    lab.wait(lab.submit(script, "--nodes=2"), "RUNNING")
    Path({ready!r}).write_text(str(lab.cluster.conf))
    time.sleep(600)
"""
NOT_ROOT = """\
import os

from tests.slurm.conftest import lab, slurm

os.geteuid = lambda: 1000

def test_something(lab):
    pass
"""


def machine() -> dict[str, object]:
    """What a lab must not change."""
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    return {
        "links": sorted(os.listdir("/sys/class/net")),
        # Tests that run beside this one mount small disks in their own folders.
        "mounts": [line for line in mounts if "/pytest-of-" not in line],
        "hosts": Path("/etc/hosts").read_text(),
        "name": socket.gethostname(),
        "run": sorted(os.listdir("/run")),
        "environment": dict(os.environ),
        "folder": os.getcwd(),
    }


def pytest_process(file: Path, **env: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "pytest",
            "-rs",
            "-p",
            "no:cacheprovider",
            f"--basetemp={file.parent / 't'}",
            str(file),
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
        cwd=file.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def left_of(lived: set[psutil.Process], conf: Path) -> set[psutil.Process]:
    """Those that have not ended within some seconds, and any new ones."""
    end = time.monotonic() + 10
    while (left := {process for process in lived if process.is_running()}) and time.monotonic() < end:
        time.sleep(0.05)
    return left | processes(conf)


def test_machine_is_as_it_was(slurm, tmp_path):
    before = machine()
    with Lab(Cluster(tmp_path, nodes=2, gpus=4, settings={"KillWait": 30})) as lab:
        assert machine() == before
        script = lab.jobs / "sleeps.sh"
        script.write_text("#!/bin/bash\nsrun sleep 600\n")
        lab.wait(lab.submit(script, "--nodes=2", "--gpus-per-node=4"), "RUNNING")
        seen = {"munged", "slurmctld", "slurmd", "slurmstepd", "unshare", "nsenter", "sleep"}
        lab.until(lambda: seen <= names(lab), "the tasks run", 10)
        lived = processes(lab.cluster.conf)
        assert "KillWait                = 30 sec" in lab.run("scontrol", "show", "config").stdout
    assert {process for process in lived if process.is_running()} == processes(lab.cluster.conf) == set()
    assert machine() == before


@pytest.fixture
def short() -> Iterator[Path]:
    """Where the lab of another pytest has its folder: the name of a socket of Slurm's has 107 letters at most."""
    with tempfile.TemporaryDirectory(prefix="lab") as folder:
        yield Path(folder)


def names(lab: Lab) -> set[str]:
    return {process.name() for process in processes(lab.cluster.conf)}


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_of_a_lab_whose_pytest_is_stopped(slurm, short, sent):
    ready, case = short / "ready", short / "test_case.py"
    case.write_text(HANGS.format(ready=str(ready)))
    process = pytest_process(case)
    while not ready.exists() and process.poll() is None:
        time.sleep(0.05)
    assert ready.exists(), process.communicate()[0]
    conf = Path(ready.read_text())
    lived = processes(conf)
    assert len(lived) > 40
    process.send_signal(sent)
    said = process.communicate(timeout=60)[0]
    assert left_of(lived, conf) == set()
    assert ("KeyboardInterrupt" in said) == (sent == signal.SIGINT)


@pytest.mark.parametrize(("required", "outcome"), [("", "1 skipped"), ("1", "1 error")])
def test_reason_is_told_where_there_can_be_no_slurm(tmp_path, required, outcome):
    case = tmp_path / "test_case.py"
    case.write_text(NOT_ROOT)
    said = pytest_process(case, MEGASCHED_REQUIRE_SLURM=required).communicate(timeout=60)[0]
    assert outcome in said
    assert "the tests on a real Slurm need root" in said
