"""The launcher without Slurm: restarts, ends and refusals, with a Python and an ssh that are stand-ins."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from megasched.errors import ConfigError
from megasched.launch.jobs.checks import Checks
from megasched.launch.status.run_status import RunReader
from megasched.launch.torchrun import start
from megasched.launch.torchrun.script import TorchrunJob, render
from megasched.launch.torchrun.start import Prepared, Supervisor, prepare, write
from megasched.launch.watched_run import INTERRUPTED
from tests import tiny
from tests.launch import hosts
from tests.waiting import signalled, until

ROOT = Path(__file__).parents[3]
# Says on which host it is and does what BODY says; each start of a host adds a line to `starts-<node>`. A host
# that stays is ended by its traps; by itself it would stay for longer than a test may take.
PYTHON = """#!/usr/bin/env bash
here=${0%/*}
for word in "$@"; do case $word in --node-rank=*) node=${word#*=} ;; esac; done
echo "$MASTER_PORT" >>"$here/starts-$node"
number=$(wc -l <"$here/starts-$node")
echo "node $node speaks"
stay() { touch "$here/stays-$node"; for ((i = 0; i < 12000; i++)); do sleep 0.05; done; }
until_stays() { until [[ -e $here/stays-$1 ]]; do sleep 0.05; done; }
"""
SLEEP = "exec sleep 3600\n"


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(start, "SECONDS_IN_VAIN", 0)


class Bench:
    """Runs jobs to their end."""

    def __init__(self, folder: Path, monkeypatch) -> None:
        self.folder, self.said = folder, []
        monkeypatch.setenv("PATH", hosts.add_ssh(folder / "bin")["PATH"])

    def job(self, body: str, *names: str, **changes) -> TorchrunJob:
        path = self.folder / "bin" / "python"
        path.write_text(PYTHON + body)
        path.chmod(0o755)
        given = {
            "run_folder": self.folder / "run",
            "directory": self.folder,
            "hosts": names,
            "gpus_per_node": 1,
            "script": "pretrain_gpt.py",
            "flags": ("--save", "ckpt"),
            "python": str(path),
        }
        return TorchrunJob(**(given | changes))

    def supervisor(self, job: TorchrunJob) -> Supervisor:
        write(Prepared(job, render(job)))
        return Supervisor(job, say=self.said.append, on_line=lambda line: None)

    def run(self, job: TorchrunJob) -> int:
        return self.supervisor(job).run()

    def starts(self) -> list[str]:
        return (self.folder / "bin" / "starts-0").read_text().split()

    def log(self, restart: int, node: int = 0) -> str:
        return (self.folder / "run" / "logs" / f"torchrun-{restart}" / f"node-{node}.log").read_text()


@pytest.fixture
def bench(tmp_path, monkeypatch):
    return Bench(tmp_path, monkeypatch)


def alive(job: TorchrunJob) -> list[list[str]]:
    """The command lines of what is left of a job."""
    return list(hosts.processes(job.run_id).values())


def sleepers(job: TorchrunJob) -> int:
    """Hosts whose part has come to its SLEEP."""
    return alive(job).count(["sleep", "3600"])


def test_the_output_of_each_host_is_kept(bench):
    job = bench.job("echo bad words >&2\n", "a", "b")
    assert bench.run(job) == 0
    assert [bench.log(0, node) for node in (0, 1)] == ["node 0 speaks\nbad words\n", "node 1 speaks\nbad words\n"]
    kept = (job.run_folder / "logs" / "torchrun.log").read_text()
    assert kept == "".join(f"{line}\n" for line in bench.said)
    assert "on a, b, last checkpoint: none" in bench.said[0]
    assert bench.said[-1].endswith("megasched: torchrun, restart 0: ended with status 0")


def test_lines_are_handed_on_as_they_come(bench):
    lines = []
    job = bench.job("printf 'odd \\xff\\n'\n")
    write(Prepared(job, render(job)))
    assert Supervisor(job, say=bench.said.append, on_line=lines.append).run() == 0
    assert lines == ["node 0 speaks", "odd \udcff"]


@pytest.mark.parametrize("status", [2, 17])
def test_what_no_restart_mends_is_not_restarted(bench, status):
    """Also where the other host's end is noticed first."""
    body = f"if ((node == 1)); then until_stays 0; exit 1; fi\ntrap 'exit {status}' TERM\nstay\n"
    assert bench.run(bench.job(body, "a", "b")) == status
    assert len(bench.starts()) == 1
    assert "a restart mends neither" in bench.said[-1]


@pytest.mark.parametrize("names", [(), ("a", "b")], ids=["here", "hosts"])
def test_the_error_of_a_rank_is_the_last_that_is_said(bench, names):
    body = "echo a warning; echo 'megasched: error: no such file'; echo '    remedy: another'; exit 2\n"
    assert bench.run(bench.job(body, *names)) == 2
    assert bench.said[-1] == "megasched: error: no such file\n    remedy: another"
    assert "a restart mends neither" in bench.said[-2]


def test_one_that_fails_ends_all_and_all_are_started_again(bench):
    first = "if ((node == 1)); then until_stays 0; exit 3; fi\ntrap 'echo told to end; exit 1' TERM\nstay\n"
    job = bench.job(f"if ((number == 1)); then\n{first}fi\n", "a", "b")
    assert bench.run(job) == 0
    assert bench.log(0) == "node 0 speaks\ntold to end\n"
    assert any("restart 0: b ended with status 3: the others are ended" in line for line in bench.said)
    assert "node 1 speaks" in bench.said  # the end of the log of the one that failed
    assert bench.log(1, 1) == "node 1 speaks\n"
    assert len(set(bench.starts())) == 2  # each at a port of its own
    assert not alive(job)


def test_starts_in_a_row_that_bring_nothing_are_counted(bench):
    body = "mkdir -p ckpt; ((number == 3)) && echo 10 >ckpt/latest_checkpointed_iteration.txt\nexit 5\n"
    assert bench.run(bench.job(body, max_restarts=2)) == 5
    # The third saves. It and two that bring nothing after it may fail; then a third such one is the last.
    assert len(bench.starts()) == 6
    assert "2 restarts have brought no checkpoint after iteration 10" in bench.said[-1]


def test_without_save_every_start_is_in_vain(bench):
    assert bench.run(bench.job("exit 5\n", flags=("--lr", "1"), max_restarts=1)) == 5
    assert len(bench.starts()) == 2


def test_pauses_grow_with_the_starts_in_vain(bench, monkeypatch):
    pauses = []
    monkeypatch.setattr(start, "SECONDS_IN_VAIN", 0.25)
    monkeypatch.setattr(start, "time", SimpleNamespace(sleep=pauses.append))
    bench.run(bench.job("exit 5\n", max_restarts=2))
    assert pauses == [0.25, 0.5]
    assert [line.partition(": it is started again")[2] for line in bench.said if "started again" in line] == [
        *(" in 0.25 s", " in 0.5 s")
    ]


def test_each_launch_takes_the_next_number(bench):
    job = bench.job("")
    for _ in range(2):
        bench.run(job)
    assert bench.log(1) == "node 0 speaks\n"
    assert not (job.run_folder / "job.sh.1").exists()  # the same script


def test_a_host_that_is_down_fails_the_start(bench):
    job = bench.job(SLEEP, "a", "down1", max_restarts=0)
    assert bench.run(job) == 255
    assert "No route to host" in bench.log(0, 1)
    assert not alive(job)


@pytest.mark.parametrize("names", [(), ("a", "b")])
def test_ctrl_c_ends_it_everywhere(bench, names):
    job = bench.job(SLEEP, *names)
    supervisor = bench.supervisor(job)
    with signalled(signal.SIGTERM, lambda: sleepers(job) == job.nodes):
        assert supervisor.run() == INTERRUPTED
    assert len(bench.starts()) == 1
    assert not alive(job)
    found = RunReader(str(job.run_folder)).look()
    assert (found.state, found.error) == ("stopped", "ended by Ctrl-C or SIGTERM")


def test_sigusr1_saves_and_ends_ranks_that_are_still_starting_too(bench, monkeypatch):
    """They hear it when it is said again; what is said first is lost on them."""
    monkeypatch.setattr(start, "SECONDS_TO_SAY_AGAIN", 0.2)
    starting = "trap 'lost=1' URG\ntouch $here/begins-$node\nuntil [[ ${lost-} ]]; do sleep 0.05; done\n"
    job = bench.job(f"{starting}trap 'echo saved; exit 0' URG\nstay\nexit 1\n", "a", "b")
    begins = [bench.folder / "bin" / f"begins-{node}" for node in (0, 1)]
    with signalled(signal.SIGUSR1, lambda: all(path.exists() for path in begins)):
        assert bench.run(job) == 0
    assert [bench.log(0, node).splitlines()[-1] for node in (0, 1)] == ["saved", "saved"]
    assert len([line for line in bench.said if "SIGUSR1" in line]) == 1


def test_a_run_that_is_asked_to_save_in_a_pause_is_not_started_again(bench, monkeypatch):
    def pause(seconds):
        assert seconds == 1
        os.kill(os.getpid(), signal.SIGUSR1)
        until(lambda: any("SIGUSR1: the ranks save" in line for line in bench.said))

    monkeypatch.setattr(start, "SECONDS_IN_VAIN", 1)
    monkeypatch.setattr(start, "time", SimpleNamespace(sleep=pause))
    assert bench.run(bench.job("exit 5\n")) == 5
    assert len(bench.starts()) == 1


def test_the_death_of_the_launcher_ends_it_everywhere(bench):
    job = bench.job(SLEEP, "a", "b")
    write(Prepared(job, render(job)))
    code = (
        "import sys; from megasched.launch.torchrun.start import Supervisor; "
        "from tests.launch.torchrun.test_start import job_of; "
        "Supervisor(job_of(sys.argv[1]), say=print, on_line=print).run()"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(job.run_folder / "job.json")], cwd=ROOT)
    until(lambda: sleepers(job) == 2)
    process.kill()
    process.wait()
    until(lambda: not alive(job))


def job_of(description: str) -> TorchrunJob:
    found = json.loads(Path(description).read_text())["job"]
    return TorchrunJob(**{**found, "run_folder": Path(found["run_folder"]), "directory": Path(found["directory"])})


def test_all_that_is_wrong_is_said_at_once(bench):
    job = bench.job("", "a", "down1", "b", directory=bench.folder / "nowhere")
    with pytest.raises(ConfigError) as caught:
        prepare(job, Checks(check_run=False))
    lines = str(caught.value).splitlines()
    assert lines[0] == "this job would fail, and was not started:"
    assert len(lines) == 4
    assert "host a: ls: cannot access" in lines[1]
    assert f"{bench.folder}/nowhere" in lines[1]
    assert lines[2] == "  - host down1: ssh: connect to host down1 port 22: No route to host"
    assert not job.run_folder.exists()


def test_a_job_that_hosts_can_run_is_prepared(bench):
    job = bench.job("", "a", "b")
    assert prepare(job, Checks(check_run=False)).text == render(job)


def test_the_command_passes_the_status_on_and_prints_json(bench):
    (bench.folder / "pretrain_gpt.py").write_text("import sys; print('here'); sys.exit(2)")
    command = [sys.executable, "-m", "megasched", "launch", "torchrun", "--gpus-per-node", "1", "--no-check"]
    command += ["--json", "--dir", str(bench.folder / "run"), "--", "./pretrain_gpt.py", "--rehearse"]
    command += ["--model-schedule", "auto", "--hf-model", tiny.save("llama", bench.folder / "model")]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    found = subprocess.run(command, cwd=bench.folder, env=env, capture_output=True, text=True, check=False)
    assert found.returncode == 2, found.stderr
    result = json.loads(found.stdout)
    assert (result["starts"], result["status"]) == ([0], 2)
    assert "exitcode  : 2" in found.stderr
