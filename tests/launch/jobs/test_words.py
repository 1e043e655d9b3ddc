"""Values that no program can be started with are refused before anything is written; ranks end with torchrun."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from megasched.cli.launch import launch_local
from megasched.errors import ConfigError
from megasched.launch.jobs.checks import Checks
from megasched.launch.jobs.words import LONGEST, refuse_unusable
from megasched.launch.local import LocalJob
from megasched.launch.slurm import start as slurm
from megasched.launch.slurm.templates import JOB
from megasched.launch.torchrun import start as torchrun
from megasched.launch.torchrun.script import TorchrunJob
from megasched.trainer import entry
from tests.waiting import until

ODD = {
    "a\0b": r"has a NUL in it; no program can be started with it",
    "a\udcff": r"has half a surrogate pair in it, which is no text in UTF-8",
    "x" * LONGEST: rf"has 1310\d\d bytes, the kernel takes {LONGEST}",
}


def jobs(folder: Path):
    given = {
        "run_folder": folder / "run",
        "directory": folder,
        "script": "pretrain_gpt.py",
        "flags": ("--lr", "1"),
    }
    return {
        "slurm": replace(JOB, **given),
        "torchrun": TorchrunJob(**given, gpus_per_node=1, python=sys.executable),
        "local": LocalJob(folder / "run", 2, "pretrain_gpt.py", ("--lr", "1")),
    }


def start(kind, job):
    if kind == "local":
        launch_local(job, Checks(check_run=False), show=print, as_json=False)
    elif kind == "slurm":
        slurm.write(slurm.prepare(job, Checks(check_run=False), ask_slurm=False))
    else:
        torchrun.write(torchrun.prepare(job, Checks(check_run=False)))


@pytest.mark.parametrize("kind", ["slurm", "torchrun", "local"])
@pytest.mark.parametrize("word", ODD)
def test_a_word_that_no_program_takes(kind, word, tmp_path):
    job = jobs(tmp_path)[kind]
    name = "given" if kind == "local" else "flags"
    with pytest.raises(ConfigError, match=ODD[word]) as caught:
        start(kind, replace(job, **{name: ("--save", word)}))
    assert str(caught.value).startswith(f"{name}[1] of the job: ")
    assert len(str(caught.value).encode()) < 400
    if kind != "local":
        with pytest.raises(ConfigError, match=f"environment NAME of the job: .*{ODD[word]}"):
            start(kind, replace(job, environment={"NAME": word}))
    assert list(tmp_path.iterdir()) == []


def test_words_that_are_too_many_together(tmp_path):
    refuse_unusable(JOB)
    flags = ["x" * 1000] * (os.sysconf("SC_ARG_MAX") // 2000)
    with pytest.raises(ConfigError, match=r"the job's words have \d+ bytes together"):
        refuse_unusable(replace(JOB, flags=flags))


PARENT = """
import subprocess, sys
child = "import signal, time; from megasched.launch.with_parent import end_with_parent; "
child += "signal.signal(signal.SIGTERM, signal.SIG_IGN); end_with_parent(signal.SIGKILL); print(1, flush=True); "
print(subprocess.Popen([sys.executable, "-c", child + "time.sleep(3600)"]).pid, flush=True)
sys.stdin.read()
"""


def test_a_process_ends_with_the_one_that_started_it():
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    child = psutil.Process(int(parent.stdout.readline()))
    assert parent.stdout.readline() == "1\n"
    parent.send_signal(signal.SIGKILL)
    parent.communicate()
    until(lambda: not psutil.pid_exists(child.pid) or child.status() == psutil.STATUS_ZOMBIE)


@pytest.mark.parametrize("of_torchrun", [True, False])
def test_a_rank_of_torchrun_asks_for_it(monkeypatch, of_torchrun):
    asked = []
    monkeypatch.setattr(entry, "end_with_parent", asked.append)
    monkeypatch.setattr(entry, "_run", lambda script, argv: None)
    monkeypatch.delenv(entry.OF_TORCHRUN, raising=False)
    if of_torchrun:
        monkeypatch.setenv(entry.OF_TORCHRUN, "none")
    entry.run_script("pretrain_gpt.py", [])
    assert asked == [signal.SIGKILL] * of_torchrun
