"""A rehearsal on this machine: its command, what it warns of, and its ends."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from megasched.launch import local
from megasched.launch.local import LocalJob, narrow
from megasched.launch.status.run_status import RunReader
from tests import tiny

ROOT = Path(__file__).parents[2]
JOB = LocalJob(run_folder=Path("/runs/llama"), ranks=2, script="pretrain_gpt.py", given=("--lr", "1e-3"))
# In the place of training. Each line is one write, or those of two ranks could mix; both speak before one ends.
SCRIPT = """
import glob, os, sys, time
rank = os.environ["RANK"]
variables = [os.environ.get(name) for name in ("OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "CUDA_VISIBLE_DEVICES")]
sys.stdout.write(f"rank {rank} of {os.environ['WORLD_SIZE']}: {'a b' in sys.argv} {variables}\\n")
open(f"spoken-{rank}", "w").close()
while len(glob.glob("spoken-*")) < 2:
    time.sleep(0.05)
END
"""


# A Python for ranks that need no Megatron: `-u -m megasched SCRIPT` is SCRIPT alone.
LIGHT = f"""\
#!/bin/sh
if [ "$1 $2 $3" = "-u -m megasched" ]; then shift 3; fi
exec {shlex.quote(sys.executable)} "$@"
"""
COMMAND = "import sys; sys.executable = sys.argv.pop(1); from megasched.cli.main import main; main()"


def begin(
    folder: Path, end: str, *flags: str, python: str = sys.executable, **variables: str
) -> subprocess.Popen[str]:
    (folder / "pretrain_gpt.py").write_text(SCRIPT.replace("END", end))
    model = tiny.save("llama", folder / "model")
    command = [sys.executable, "-c", COMMAND, python, "launch", "local", "--ranks", "2", "--no-check"]
    command += ["--dir", "run", "--", "./pretrain_gpt.py", "--model-schedule", "auto", "--hf-model", model, *flags]
    unset = ("OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "CUDA_VISIBLE_DEVICES")
    env = {name: value for name, value in os.environ.items() if name not in unset}
    env |= {"PYTHONPATH": str(ROOT), **variables}
    return subprocess.Popen(
        command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.fixture
def light(tmp_path: Path) -> str:
    path = tmp_path / "python"
    path.write_text(LIGHT)
    path.chmod(0o755)
    return str(path)


def test_a_rehearsal_says_so_once():
    assert JOB.flags == ["--rehearse", "--lr", "1e-3"]
    assert replace(JOB, given=("--lr", "1", "--rehearse")).flags == ["--lr", "1", "--rehearse"]


def test_the_output_goes_to_the_log_and_on_and_the_status_is_the_ranks(tmp_path):
    process = begin(tmp_path, "sys.exit(17 * int(os.environ['RANK']))", "a b", OMP_NUM_THREADS="3")
    out, err = process.communicate()
    assert process.returncode == 17, err
    log = (tmp_path / "run" / "logs" / "local-0" / "node-0.log").read_text()
    assert log == out
    assert {f"rank {rank} of 2: True ['3', 'lo', '']" for rank in (0, 1)} <= set(log.splitlines())
    assert "REHEARSAL: no GPU is used" in log
    assert "exitcode  : 17" in log


SLEEP = "sys.stdout.write(f'{os.getpid()}\\n'); time.sleep(3600)"  # longer than a test may take


def pids(process: subprocess.Popen[str]) -> list[int]:
    """Those of the ranks, as they say them."""
    found: list[int] = []
    while len(found) < 2:
        line = process.stdout.readline()
        assert line
        found += [int(line)] if line.strip().isdecimal() else []
    return found


def test_no_rank_outlives_a_launcher_that_is_killed(tmp_path, light):
    process = begin(tmp_path, SLEEP, python=light)
    ranks = [psutil.Process(pid) for pid in pids(process)]
    (torchrun,) = {rank.parent() for rank in ranks}
    process.kill()
    try:
        process.communicate()
        psutil.wait_procs([torchrun, *ranks])
    finally:
        for one in (torchrun, *ranks):
            with suppress(psutil.NoSuchProcess):
                one.kill()


def test_sigterm_ends_all_ranks(tmp_path, light):
    (tmp_path / "ckpt").mkdir()
    (tmp_path / "ckpt" / "latest_checkpointed_iteration.txt").write_text("20")
    process = begin(tmp_path, SLEEP, "--save", "ckpt", python=light)
    ranks = pids(process)
    process.send_signal(signal.SIGTERM)
    said = process.communicate()[1].splitlines()[-1]
    assert process.returncode == 130
    assert said.startswith("megasched: ended by Ctrl-C or SIGTERM, and with it the ranks; ")
    assert said.endswith(f"last checkpoint: iteration 20 in ckpt; log: {tmp_path}/run/logs/local-0/node-0.log")
    assert not any(psutil.pid_exists(rank) for rank in ranks)
    found = RunReader(str(tmp_path / "run")).look()
    assert (found.state, found.error) == ("stopped", "ended by Ctrl-C or SIGTERM")


def test_each_start_has_a_log_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr(local, "run_watched", lambda command, *, env, log_path, on_line: log_path.write_text("x"))
    job = replace(JOB, run_folder=tmp_path)
    logs = [local.run(job, say=print, on_line=print)[1] for _ in range(2)]
    assert logs == [tmp_path / "logs" / f"local-{restart}" / "node-0.log" for restart in (0, 1)]


def test_what_a_machine_has_too_little_of(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    assert narrow(2, {}) == []
    assert narrow(3, {}) == ["3 ranks share 2 cores: they take turns, and may be slow"]
    (found,) = narrow(2, {"checkpoint_bytes": psutil.virtual_memory().total * 1000})
    assert "GiB of memory are free" in found


@pytest.mark.parametrize("ranks", ["0", "-1"])
def test_there_is_a_rank(ranks):
    command = [sys.executable, "-m", "megasched", "launch", "local", "--ranks", ranks, "--", "pretrain_gpt.py"]
    assert subprocess.run(command, cwd=ROOT, capture_output=True, check=False).returncode == 2
