"""The script of a job without Slurm: what bash makes of it, with stand-ins for Python and ssh."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megasched.errors import ConfigError
from megasched.launch.torchrun.script import TorchrunJob, hosts_of, render
from megasched.launch.torchrun.start import over_ssh
from tests.launch import hosts
from tests.waiting import until

JOB = TorchrunJob(
    run_folder=Path("/runs/llama"),
    directory=Path("/work"),
    gpus_per_node=8,
    script="pretrain_gpt.py",
    flags=("--model-schedule", "auto", "--save", "/ckpt"),
    python="python",
)
VARIANTS = {
    "here": JOB,
    "hosts": replace(JOB, hosts=("node1", "node2")),
    "all": replace(
        JOB,
        hosts=("node1", "node2"),
        interface="bond0",
        environment={"NCCL_DEBUG": "INFO", "WORDS": "it's two"},
        flags=(*JOB.flags, "--load", "/other", "--finetune"),
        run_folder=Path("/runs/it's my run\nrm -r /"),
        script="a\nb.py",
    ),
    "commas": replace(JOB, flags=("--split", "99,1,0")),
    "nothing kept": replace(JOB, flags=("--model-schedule", "auto")),
}

# Writes down its words and its environment, then does what BODY says.
PYTHON = """#!/usr/bin/env bash
here=${0%/*}
printf '%s\\0' "$@" >"$here/words.part" && mv "$here/words.part" "$here/words"
env -0 >"$here/environment"
"""
SLEEP = ["sleep", "3600"]  # longer than a test may take


class Bench:
    """Runs a script as the launcher does, with a Python that is none."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = hosts.add_ssh(folder / "bin")
        self.python("")

    def python(self, body: str) -> None:
        path = self.folder / "bin" / "python"
        path.write_text(PYTHON + body)
        path.chmod(0o755)

    def job(self, **changes) -> TorchrunJob:
        own = {
            "run_folder": self.folder / "run",
            "directory": self.folder,
            "python": str(self.folder / "bin" / "python"),
            "flags": ("--model-schedule", "auto", "--save", str(self.folder / "ckpt")),
        }
        return replace(JOB, **{**own, **changes})

    def begin(self, job: TorchrunJob, node: int = 0, restart: int = 0, **variables: str) -> subprocess.Popen[str]:
        script = job.run_folder / "job.sh"
        script.parent.mkdir(parents=True, exist_ok=True)
        script.write_bytes(render(job).encode())
        command = ["bash", str(script), str(node), str(restart)]
        return subprocess.Popen(
            over_ssh(job.hosts[node], command) if job.hosts else command,
            env={**self.path, **variables},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, job: TorchrunJob, node: int = 0, restart: int = 0, **variables: str) -> int:
        process = self.begin(job, node, restart, **variables)
        # Its stdin stays open, as the launcher keeps it.
        assert process.wait() is not None
        assert not process.stderr.read()
        process.stdin.close()
        return process.returncode

    def words(self) -> list[str]:
        return (self.folder / "bin" / "words").read_bytes().decode().split("\0")[:-1]

    def environment(self) -> dict[str, str]:
        lines = (self.folder / "bin" / "environment").read_bytes().decode().split("\0")
        return dict(line.split("=", 1) for line in lines if line)

    def until_it_runs(self) -> None:
        until(lambda: (self.folder / "bin" / "words").exists())


@pytest.fixture
def bench(tmp_path):
    return Bench(tmp_path)


@pytest.mark.parametrize("name", VARIANTS)
def test_shellcheck_finds_nothing(name, tmp_path):
    script = tmp_path / "job.sh"
    script.write_text(render(VARIANTS[name]))
    shellcheck = shutil.which("shellcheck", path=str(Path(sys.executable).parent))
    found = subprocess.run([shellcheck, str(script)], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout


def test_the_command_of_a_host(bench):
    job = bench.job(hosts=("node1", "node2"), interface="bond0")
    assert bench.run(job, node=1) == 0
    save, port = str(bench.folder / "ckpt"), 20000 + int(job.run_id, 16) % 10000
    assert bench.words() == [
        *("-m", "megasched.launch.torchrun.node", "--nnodes=2", "--node-rank=1", "--nproc-per-node=8"),
        *("--master-addr=node1", f"--master-port={port}", "--no-python"),
        *(job.python, "-u", "-m", "megasched", "pretrain_gpt.py", "--model-schedule", "auto", "--save", save),
        *("--load", save, "--exit-signal-handler", "--exit-signal", "SIGURG"),
    ]
    found = bench.environment()
    wanted = {
        "MASTER_ADDR": "node1",
        "MASTER_PORT": str(port),
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "NCCL_SOCKET_IFNAME": "bond0",
        "GLOO_SOCKET_IFNAME": "bond0",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": f"{job.run_folder}/logs/torchrun-0/collectives-rank-",
    }
    assert wanted.items() <= found.items()
    (call,) = hosts.ssh_calls(bench.folder / "bin")
    assert call[:7] == [*("-o", "BatchMode=yes", "-o", "ConnectTimeout=30", "-o", "ServerAliveInterval=30", "--")]
    assert call[7:] == ["node2", f"bash {job.run_folder}/job.sh 1 0"]


def test_a_restart_meets_elsewhere(bench):
    ports = set()
    for restart in (0, 1):
        bench.run(bench.job(hosts=("node1",)), restart=restart)
        ports.add(bench.environment()["MASTER_PORT"])
    assert len(ports) == 2


def test_here_the_launcher_chooses_the_port(bench):
    bench.run(bench.job(), MASTER_PORT="4711")
    assert {"--nnodes=1", "--master-addr=127.0.0.1", "--master-port=4711"} <= set(bench.words())


# NUL can't be in a word of a command line.
WORDS = st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\0"), max_size=12)
ODD = st.sampled_from(["--load", "--", "-", "$(id)", "`id`", "; id", "'", '"', "\n", "*", "~", "!!", "\\"])


@settings(max_examples=40)
@given(
    flags=st.lists(WORDS | ODD),
    over=st.booleans(),
    folder=st.text("ab '\"$`\\\n;&~*!-", min_size=1, max_size=8).map(lambda name: f"r{name}"),
)
def test_every_word_reaches_torchrun_as_it_was(tmp_path_factory, flags, over, folder):
    bench = Bench(tmp_path_factory.mktemp("words"))
    odd = "|".join(flags)
    job = bench.job(
        run_folder=bench.folder / folder,
        flags=("--flag", *flags),
        environment={"ODD": odd},
        hosts=("node1",) if over else (),
    )
    assert bench.run(job) == 0
    words = bench.words()
    command = words[words.index("--no-python") + 1 :]
    assert command[:5] == [job.python, "-u", "-m", "megasched", "pretrain_gpt.py"]
    assert sorted(command[5:]) == sorted(job.flags)
    assert bench.environment()["ODD"] == odd
    assert (job.run_folder / "logs" / "torchrun-0").is_dir()


@pytest.mark.parametrize("saved", [False, True])
def test_what_begins_a_run_does_not_begin_its_restart(bench, saved):
    save = bench.folder / "ckpt"
    save.mkdir()
    if saved:
        (save / "latest_checkpointed_iteration.txt").write_text("5")
    bench.run(bench.job(flags=("--save", str(save), "--load", "/other", "--finetune", "--lr", "1e-3")))
    start = ["--load", str(save)] if saved else ["--load", "/other", "--finetune"]
    rest = ["--save", str(save), "--lr", "1e-3", *start, "--exit-signal-handler", "--exit-signal", "SIGURG"]
    assert bench.words()[-len(rest) :] == rest


@pytest.mark.parametrize("status", [0, 1, 2, 17, 137])
def test_the_status_is_passed_on(bench, status):
    bench.python(f"exit {status}\n")
    assert bench.run(bench.job(hosts=("node1",))) == status


def test_it_ends_with_its_stdin(bench):
    """Over ssh no signal comes: neither Ctrl-C nor the launcher's death."""
    bench.python("exec sleep 3600\n")
    job = bench.job(hosts=("node1",))
    process = bench.begin(job)
    bench.until_it_runs()
    until(lambda: SLEEP in hosts.processes(job.run_id).values())
    process.stdin.close()
    assert process.wait() == 128 + signal.SIGTERM
    assert not hosts.processes(job.run_id)


def test_the_end_of_ssh_itself_ends_it_too(bench):
    bench.python("exec sleep 3600\n")
    job = bench.job(hosts=("node1",))
    process = bench.begin(job)
    bench.until_it_runs()
    process.kill()
    process.communicate()
    until(lambda: not hosts.processes(job.run_id))


def test_a_line_asks_the_ranks_to_save(bench):
    trapped = bench.folder / "trapped"
    stays = "for ((i = 0; i < 12000; i++)); do sleep 0.05; done\nexit 1\n"
    bench.python(f"trap 'echo saved; exit 0' URG\ntouch {trapped}\n{stays}")
    process = bench.begin(bench.job())
    until(trapped.exists)
    process.stdin.write("save\n")
    process.stdin.flush()
    assert process.wait() == 0
    assert process.stdout.read() == "saved\n"
    process.stdin.close()


def test_what_a_killed_torchrun_leaves_is_ended(bench):
    bench.python("setsid sleep 3600 &\nkill -KILL $$\n")
    job = bench.job()
    process = bench.begin(job)
    assert process.wait() == 128 + signal.SIGKILL
    process.communicate()
    until(lambda: not hosts.processes(job.run_id))


def test_by_hand_without_a_stdin_it_runs_to_its_end(bench):
    job, ends = bench.job(), bench.folder / "ends"
    bench.run(job)  # writes the script
    (bench.folder / "bin" / "words").unlink()
    bench.python(f"until [[ -e {ends} ]]; do sleep 0.05; done\nexit 3\n")
    process = psutil.Popen(["bash", job.run_folder / "job.sh", "0", "1"], stdin=subprocess.DEVNULL)
    bench.until_it_runs()
    until(lambda: process.poll() is not None or process.status() == psutil.STATUS_SLEEPING)
    assert len(process.children()) == 1  # it waits for that one, and nothing for the end of stdin, which is there
    ends.touch()
    assert process.wait() == 3


def test_it_says_how_it_is_called(bench):
    job = bench.job()
    bench.run(job)
    found = subprocess.run(["bash", job.run_folder / "job.sh"], capture_output=True, text=True, check=False)
    assert (found.returncode, found.stderr) == (2, f"usage: bash {job.run_folder}/job.sh NODE_RANK RESTART\n")


@pytest.mark.parametrize(
    "text", ["-oProxyCommand=id", "a,-l", "a b", "a,", "a;id", "u@a", "$(id)", "a\n", "a,b,a"]
)
def test_no_host_is_anything_but_a_name(text):
    with pytest.raises(ConfigError, match="--hosts"):
        hosts_of(text)


def test_hosts():
    assert hosts_of("node-1.llm.example,10.0.0.2,gpu_3") == ("node-1.llm.example", "10.0.0.2", "gpu_3")
    assert hosts_of("") == ()


def test_runs_have_marks_of_their_own():
    assert JOB.run_id == "56b1e1da"
    assert replace(JOB, run_folder=Path("/runs/other")).run_id != JOB.run_id
