"""The batch script: what bash makes of it, with stand-ins for Slurm's programs."""

from __future__ import annotations

import os
import shutil
import signal as signals
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megasched.errors import ConfigError
from megasched.launch.jobs.job_script import environment_of, flag_lines, value_of
from megasched.launch.slurm.script import SlurmJob, render, seconds_of
from megasched.launch.slurm.templates import FOLDER, templates
from tests.waiting import until

JOB = SlurmJob(
    name="llama",
    run_folder=Path("/runs/llama"),
    directory=Path("/work"),
    nodes=8,
    gpus_per_node=8,
    script="pretrain_gpt.py",
    flags=("--model-schedule", "auto", "--save", "/ckpt"),
    python="python",
    time="24:00:00",
)
VARIANTS = {
    "plain": JOB,
    "torchrun": replace(JOB, torchrun=True),
    "all": replace(
        JOB,
        sbatch_options=("--account=llm", "--exclude=node[3,7-9]"),
        cpus_per_gpu=12,
        container="nvcr.io#nvidia/pytorch:25.09-py3",
        container_mounts="/data:/data,/home:/home:ro",
        interface="bond0",
        environment={"NCCL_DEBUG": "INFO", "WORDS": "it's two"},
        flags=(*JOB.flags, "--load", "/other", "--finetune"),
    ),
    "commas": replace(JOB, flags=("--split", "99,1,0")),
    "nothing kept": replace(JOB, flags=("--model-schedule", "auto")),
}

# What a run of the script left: the calls of each program, one a line, words separated by \x1f.
STUB = """#!/usr/bin/env bash
{ printf '%s' "${0##*/}"; printf '\\x1f%s' "$@"; printf '\\x1e'; } >>"$CALLS"
"""
STUBS = {
    "srun": """env -0 >"$CALLS.env"
for word in "$@"; do [[ $word == --output=* ]] && log=${word#--output=}; done
if [[ -e $CALLS.slow ]]; then
    touch "$CALLS.begun"
    for ((i = 0; i < 12000; i++)); do [[ -e $CALLS.end ]] && break; sleep 0.05; done
    cat "$CALLS.slow" >"${log/\\%n/0}"
fi
printf "%s" "${TOLD:-}" >&2
exit "${STATUS:-0}"
""",
    "scontrol": 'if [[ $1 == show ]]; then printf "node3\\nnode4\\n"; fi\n',
    "scancel": "",
}


class Bench:
    """Runs a script as Slurm would, with programs that write down how they were called."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.calls = folder, folder / "calls"
        self.bin = folder / "bin"
        self.bin.mkdir()
        for name, text in STUBS.items():
            (self.bin / name).write_text(STUB + text)
            (self.bin / name).chmod(0o755)

    def job(self, **changes) -> SlurmJob:
        flags = ("--model-schedule", "auto", "--save", str(self.folder / "ckpt"))
        return replace(JOB, **{"run_folder": self.folder / "run", "flags": flags, **changes})

    def begin(self, job: SlurmJob, **variables: str) -> subprocess.Popen[str]:
        script = self.folder / "job.sbatch"
        script.write_bytes(render(job).encode())
        own = {"SLURM_JOB_ID": "77", "SLURM_JOB_NODELIST": "node[3-4]", "SLURM_JOB_NUM_NODES": "2"}
        own |= {"SLURM_CPUS_PER_TASK": "12", "CALLS": str(self.calls), "PATH": f"{self.bin}:{os.environ['PATH']}"}
        self.calls.write_bytes(b"")
        return subprocess.Popen(
            ["bash", script], env={**own, **variables}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def run(self, job: SlurmJob, **variables: str) -> tuple[int, str]:
        process = self.begin(job, **variables)
        out, err = process.communicate()
        assert not err
        return process.returncode, out

    def called(self, program: str) -> list[list[str]]:
        found = [line.split("\x1f") for line in self.calls.read_bytes().decode().split("\x1e") if line]
        return [words for name, *words in found if name == program]

    def command(self) -> list[str]:
        """What the ranks run."""
        (words,) = self.called("srun")
        return words[words.index("rank") + 1 :]

    def environment(self) -> dict[str, str]:
        lines = (self.folder / "calls.env").read_bytes().decode().split("\0")
        return dict(line.split("=", 1) for line in lines if line)


@pytest.fixture
def bench(tmp_path):
    return Bench(tmp_path)


@pytest.mark.parametrize("name", [*VARIANTS, *templates()])
def test_shellcheck_finds_nothing(name, tmp_path):
    script = tmp_path / "job.sbatch"
    script.write_text(render(VARIANTS[name]) if name in VARIANTS else templates()[name])
    shellcheck = shutil.which("shellcheck", path=str(Path(sys.executable).parent))
    found = subprocess.run([shellcheck, str(script)], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout


def test_the_ranks_command(bench):
    assert bench.run(bench.job())[0] == 0
    (words,) = bench.called("srun")
    assert "--kill-on-bad-exit=1" in words
    assert f"--output={bench.folder}/run/logs/77-0/node-%n.log" in words
    save = str(bench.folder / "ckpt")
    assert bench.command() == [
        *("python", "-u", "-m", "megasched", "pretrain_gpt.py", "--model-schedule", "auto", "--save", save),
        *("--load", save, "--exit-signal-handler", "--exit-signal", "SIGURG"),
    ]
    found = bench.environment()
    assert found["MASTER_ADDR"] == "node3"
    assert found["MASTER_PORT"] == "20847"
    assert found["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert not (bench.folder / "run" / "logs" / "77-0" / "node-0.log").exists()  # srun writes it


def test_a_rank_takes_its_place_from_slurm(bench):
    bench.run(bench.job())
    (words,) = bench.called("srun")
    shell = words[words.index("bash") :]
    own = {"SLURM_PROCID": "13", "SLURM_LOCALID": "5", "SLURM_NTASKS": "64", "PATH": os.environ["PATH"]}
    shown = [*shell[: shell.index("rank") + 1], "env"]
    found = subprocess.run(shown, env=own, capture_output=True, text=True, check=True).stdout.splitlines()
    assert {"RANK=13", "LOCAL_RANK=5", "WORLD_SIZE=64"} <= set(found)


def test_torchrun_meets_at_the_first_node_and_not_where_an_earlier_start_did(bench):
    ports = set()
    for restart in ("0", "1"):
        bench.run(bench.job(torchrun=True), SLURM_RESTART_COUNT=restart)
        (words,) = bench.called("srun")
        at = words.index("megasched.launch.torchrun.node")
        assert words[at - 2 : at] == ["python", "-m"]
        assert {"--nnodes=2", "--nproc-per-node=8", f"--rdzv-id=77-{restart}", "--no-python"} <= set(words)
        (endpoint,) = [word for word in words if word.startswith("--rdzv-endpoint=node3:")]
        ports.add(endpoint)
    assert len(ports) == 2


# NUL can't be in a word of a command line; \x1e and \x1f are the stand-in's own.
WORDS = st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\0\x1e\x1f"), max_size=12)


@settings(max_examples=60)
@given(flags=st.lists(WORDS | st.sampled_from(["--load", "$(id)", "`id`", "; id", "'", '"', "\n", "*", "~"])))
def test_every_word_reaches_the_ranks_as_it_was(tmp_path_factory, flags):
    bench = Bench(tmp_path_factory.mktemp("words"))
    odd = "|".join(flags)
    job = replace(JOB, run_folder=bench.folder / "run", flags=("--flag", *flags), environment={"ODD": odd})
    assert bench.run(job)[0] == 0
    assert sorted(bench.command()[5:]) == sorted(job.flags)
    assert bench.environment()["ODD"] == odd


@given(st.lists(WORDS, max_size=8))
def test_lines_hold_all_flags(flags):
    import shlex

    assert shlex.split(" ".join(flag_lines(flags))) == flags


@pytest.mark.parametrize(
    ("status", "requeued"), [(0, False), (1, True), (137, True), (16, True), (2, False), (17, False)]
)
def test_what_ends_how_is_requeued_or_not(bench, status, requeued):
    code, said = bench.run(bench.job(), STATUS=str(status))
    assert code == status
    assert (["requeue", "77"] in bench.called("scontrol")) == requeued
    assert f"status {status}" in said


def waits(process: subprocess.Popen[str]) -> bool:
    """It has seen to all signals that it was sent, and sleeps again."""
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    found = dict(line.split(":\t", 1) for line in lines)
    return found["State"].startswith("S") and int(found["ShdPnd"], 16) == 0


SAVED = "0: [exiting program after receiving SIGTERM.] datetime: 2026-11-22 15:42:53"


@pytest.mark.parametrize(("first", "requeued"), [(2, False), (1, True)])
def test_the_status_is_of_the_task_that_failed_first(bench, first, requeued):
    """The others are ended by srun, and its own status is the highest."""
    told = (
        f"srun: error: node3: tasks 0,2: Exited with exit code {first}\nsrun: error: node4: task 9: Terminated\n"
        "srun: error: node4: task 1: Exited with exit code 9\n"
    )
    process = bench.begin(bench.job(), STATUS="143", TOLD=told)
    _, err = process.communicate()
    assert (process.returncode, err) == (first, told)
    assert (["requeue", "77"] in bench.called("scontrol")) == requeued


@pytest.mark.parametrize(
    ("signal", "printed", "requeued"), [("USR1", SAVED, True), ("USR1", "0: done", False), ("TERM", SAVED, False)]
)
def test_signals(bench, signal, printed, requeued):
    """USR1 is the time limit's: the ranks are told, and it goes on, unless that was its end. TERM: somebody else
    has decided."""
    (bench.folder / "calls.slow").write_text(printed)
    process = bench.begin(bench.job())
    until((bench.folder / "calls.begun").exists)
    process.send_signal(getattr(signals, f"SIG{signal}"))
    until(lambda: signal == "TERM" or bench.called("scancel"))
    until(lambda: process.poll() is not None or waits(process))
    (bench.folder / "calls.end").touch()
    process.communicate()
    assert process.returncode == 0
    assert bench.called("scancel") == ([["--signal=URG", "77"]] if signal == "USR1" else [])
    assert (["requeue", "77"] in bench.called("scontrol")) == requeued


# Takes as long as there is a file of the test's.
DATE = """if [[ -e $CALLS.hold ]]; then touch "$CALLS.held"; while [[ -e $CALLS.hold ]]; do sleep 0.05; done; fi
/bin/date "$@"
"""


def test_a_step_that_ends_while_a_signal_is_seen_to_keeps_its_status(bench):
    date, hold = bench.bin / "date", bench.folder / "calls.hold"
    date.write_text(STUB + DATE)
    date.chmod(0o755)
    (bench.folder / "calls.slow").write_text("0: done")
    process = bench.begin(bench.job(), STATUS="2")
    until((bench.folder / "calls.begun").exists)
    (srun,) = (one for one in psutil.Process(process.pid).children() if str(bench.bin / "srun") in one.cmdline())
    hold.touch()
    process.send_signal(signals.SIGUSR1)
    until((bench.folder / "calls.held").exists)
    (bench.folder / "calls.end").touch()
    until(lambda: not psutil.pid_exists(srun.pid))
    hold.unlink()
    process.communicate()
    assert process.returncode == 2


def test_restarts_without_a_new_checkpoint_are_counted(bench):
    job, tracker = bench.job(max_restarts=2), bench.folder / "ckpt" / "latest_checkpointed_iteration.txt"
    tracker.parent.mkdir()

    def start(restart):
        _, said = bench.run(job, STATUS="1", SLURM_RESTART_COUNT=str(restart))
        return bool(bench.called("srun")), said

    assert [start(n)[0] for n in range(3)] == [True] * 3
    tracker.write_text("10")  # so the third start has brought something
    assert [start(n)[0] for n in (3, 4, 5)] == [True] * 3
    ran, said = start(6)
    assert not ran
    assert "2 restarts have brought no checkpoint after iteration 10: given up" in said


@pytest.mark.parametrize("saved", [False, True])
def test_what_begins_a_run_does_not_begin_its_restart(bench, saved):
    save = bench.folder / "ckpt"
    begins = ["--load", "/other", "--ckpt-step", "40", "--no-load-optim", "--load-main-params-from-ckpt"]
    begins += ["--override-ckpt-iteration", "7"]
    flags = ("--save", str(save), *begins, "--lr", "1e-3")
    save.mkdir()
    if saved:
        (save / "latest_checkpointed_iteration.txt").write_text("5")
    bench.run(bench.job(flags=flags))
    start = ["--load", str(save)] if saved else begins
    assert bench.command()[5:] == [
        *("--save", str(save), "--lr", "1e-3", *start, "--exit-signal-handler", "--exit-signal", "SIGURG")
    ]


@pytest.mark.parametrize("load", [(), ("--load", "/ckpt/")])
@pytest.mark.parametrize("flag", ["--ckpt-step", "--override-ckpt-iteration"])
def test_a_run_that_would_go_back_at_each_restart_is_refused(flag, load):
    with pytest.raises(
        ConfigError, match=rf"{flag} 40 .*--save /ckpt: each restart would begin there again; give"
    ):
        render(replace(JOB, flags=("--save", "/ckpt", *load, flag, "40")))
    render(replace(JOB, flags=(*load, flag, "40")))


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "a b"},
        {"name": "a\n#SBATCH --uid=0"},
        {"sbatch_options": ("--account=x; id",)},
        {"sbatch_options": ("account",)},
        {"run_folder": Path("/runs/100%")},
    ],
)
def test_what_sbatch_would_misread_is_refused(changes):
    with pytest.raises(ConfigError, match="sbatch would misread"):
        render(replace(JOB, **changes))


@pytest.mark.parametrize("word", ["NAME", "1A=x", "A B=c", "A;id=3"])
def test_variables_are_given_by_name(word):
    with pytest.raises(ConfigError, match="NAME=VALUE"):
        environment_of([word])


def test_the_last_value_of_a_flag_counts():
    assert value_of("--save", ["--save", "a", "--save=b", "--savex", "c"]) == "b"
    assert value_of("--save", ["--load"]) == ""
    assert value_of("--save", []) == ""


@pytest.mark.parametrize("name", templates())
def test_the_plain_scripts_are_what_the_tool_writes(name, tmp_path):
    """`python -m megasched.launch.slurm.templates` writes them anew."""
    assert (FOLDER / name).read_text(encoding="utf-8") == templates()[name]


@pytest.mark.parametrize(
    ("time", "seconds"),
    [
        *(("90", 5400), ("90:30", 5430), ("1:30:05", 5405), ("2-3", 183600), ("2-3:04", 183840)),
        *(("2-3:04:05", 183845), ("", None), ("1 hour", None), ("INFINITE", None)),
    ],
)
def test_slurms_times(time, seconds):
    assert seconds_of(time) == seconds


@pytest.mark.parametrize(("time", "said"), [("1hour", "Slurm takes minutes"), ("10", "leaves no time to train")])
def test_a_time_that_leaves_none_to_train_is_refused(time, said):
    with pytest.raises(ConfigError, match=said):
        render(replace(JOB, time=time))


@pytest.mark.parametrize(("torchrun", "cores"), [(False, 8), (True, 64)])
def test_the_cores_of_a_task_are_always_asked_for(torchrun, cores):
    """Slurm gives a task one core, which a rank would share with what loads its data."""
    text = render(replace(JOB, torchrun=torchrun, nodes=2, gpus_per_node=8))
    assert f"#SBATCH --cpus-per-task={cores} " in text
    assert "srun --kill-on-bad-exit=1" in text
    assert '--cpus-per-task="$SLURM_CPUS_PER_TASK"' in text
    assert "OMP_NUM_THREADS=8" in text
