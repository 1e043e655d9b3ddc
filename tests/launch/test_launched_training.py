"""Trainings of two ranks: undisturbed by ``launch local``, and by ``launch torchrun`` with a rank killed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from megasched.launch.run_folder import RunFolder
from megasched.launch.status.run_status import RunReader
from tests import tiny
from tests.launch import hosts

ROOT = Path(__file__).parents[2]
ITERATIONS, SAVE_INTERVAL, KILLED_AFTER = 6, 2, 3
FLAGS = (
    "--hf-random-init --tensor-model-parallel-size 2 --seq-length 16 --micro-batch-size 1 "
    f"--global-batch-size 2 --train-iters {ITERATIONS} --lr 1e-3 --min-lr 1e-4 --lr-decay-style constant "
    "--mock-data --split 100,0,0 --tokenizer-type NullTokenizer --vocab-size 99 --make-vocab-size-divisible-by 4 "
    "--eval-iters 0 --log-interval 1 --use-distributed-optimizer --ckpt-format torch_dist "
    f"--save-interval {SAVE_INTERVAL} --num-dataset-builder-threads 1 --no-mmap-bin-files"
).split()
# Rank 1 is killed in its fourth step, once.
SCHEDULE = f"""
import os, runpy, signal
from pathlib import Path

good = runpy.run_path("{ROOT}/examples/schedules/llama.py")["schedule"]
MARK, forwards = Path(__file__).with_name("killed"), []

def kill_once(module, inputs):
    forwards.append(module)
    if len(forwards) > {KILLED_AFTER} * 2 and os.environ["RANK"] == "1" and not MARK.exists():
        MARK.touch()
        os.kill(os.getpid(), signal.SIGKILL)

def schedule(sch, layout):
    good(sch, layout)
    sch["model.layers.1.mlp"].hook("fw_pre", kill_once)
"""
LINE = re.compile(r" iteration\s+(\d+)/\s*\d+ \|.* lm loss: (\S+) \|.* grad norm: (\S+) \|")


def launch(kind: str, folder: Path, *options: str, flags, **settings) -> str:
    """What is printed."""
    command = [sys.executable, "-m", "megasched", "launch", kind, *options, "--dir", str(folder / kind), "--"]
    command += ["pretrain_gpt.py", *FLAGS, *flags, "--hf-model", tiny.save("llama", folder / "model")]
    command += ["--save", str(folder / kind / "checkpoints"), "--data-cache-path", str(folder / "cache")]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **settings
    )
    try:
        out, _ = process.communicate()
    finally:
        process.terminate()
    assert process.returncode == 0, out[-5000:]
    return out


def iterations(folder: RunFolder, restart: int, name: str = "torchrun") -> dict[int, tuple[float, float]]:
    """Iteration -> loss and gradient norm that one start has printed."""
    logs = folder.attempt_folder(name, restart).glob("node-*.log")
    found = LINE.findall("".join(path.read_text(errors="replace") for path in sorted(logs)))
    return {int(number): (float(loss), float(norm)) for number, loss, norm in found}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("trainings")


@pytest.fixture(scope="module")
def undisturbed(folder) -> RunFolder:
    """Of ``launch local``, checked beforehand."""
    out = launch("local", folder, "--ranks", "2", flags=["--model-schedule", "auto"])
    assert "pretrain_gpt.py on 2 ranks of this machine: TP2, 2 micro-batches" in out
    return RunFolder(folder / "local")


def test_a_rehearsal_comes_to_its_end_and_has_a_status(undisturbed):
    found = RunReader(str(undisturbed.path)).look()
    assert (found.state, found.iteration, found.restarts, found.gpus) == ("finished", ITERATIONS, 0, 2)
    assert found.saved.iteration == ITERATIONS
    assert set(iterations(undisturbed, 0, "local")) == set(range(1, ITERATIONS + 1))


def test_a_killed_rank_is_followed_by_a_restart_from_the_checkpoint(folder, undisturbed, tmp_path):
    run, schedule = RunFolder(folder / "torchrun"), tmp_path / "schedule.py"
    schedule.write_text(SCHEDULE)
    out = launch(
        "torchrun",
        folder,
        *("--hosts", "localhost,127.0.0.1", "--gpus-per-node", "1", "--interface", "lo", "--no-check"),
        flags=["--model-schedule", str(schedule), "--allow-unverified", "--rehearse"],
        env=hosts.add_ssh(tmp_path / "bin"),
    )
    assert "127.0.0.1 ended with status 137" in out
    assert "it ended with status 137: it is started again" in out

    before, after = iterations(run, 0), iterations(run, 1)
    assert list(before) == [1, 2, 3]
    assert list(after) == [3, 4, 5, 6]
    expected = iterations(undisturbed, 0, "local")
    for found in (before, after):
        for number, iteration in enumerate(found):
            assert found[iteration][1] == pytest.approx(expected[iteration][1], abs=0.0015)
            if number != 1:  # Megatron's second line of a process holds a mean with the first one in it
                assert found[iteration][0] == pytest.approx(expected[iteration][0], rel=2e-6)
    status = RunReader(str(run.path)).look()
    assert (status.state, status.iteration, status.restarts) == ("finished", ITERATIONS, 1)
