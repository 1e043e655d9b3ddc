"""Trainings of two ranks: undisturbed by ``launch local``, and by ``launch torchrun`` with a rank killed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megasched.launch.run_folder import RunFolder
from megasched.launch.status.run_status import RunReader
from megasched.launch.torchrun.script import TorchrunJob
from tests import tiny
from tests.launch import hosts

ROOT = Path(__file__).parents[2]
ITERATIONS, SAVE_INTERVAL = 20, 5
FLAGS = (
    "--model-schedule auto --hf-random-init --tensor-model-parallel-size 2 --seq-length 16 --micro-batch-size 1 "
    f"--global-batch-size 2 --train-iters {ITERATIONS} --lr 1e-3 --min-lr 1e-4 --lr-decay-style constant "
    "--mock-data --split 100,0,0 --tokenizer-type NullTokenizer --vocab-size 99 --make-vocab-size-divisible-by 4 "
    "--eval-iters 0 --log-interval 1 --use-distributed-optimizer --ckpt-format torch_dist "
    f"--save-interval {SAVE_INTERVAL} --num-dataset-builder-threads 1 --no-mmap-bin-files"
).split()
LINE = re.compile(r" iteration\s+(\d+)/\s*\d+ \|.* lm loss: (\S+) \|.* grad norm: (\S+) \|")


def launch(kind: str, folder: Path, *options: str, flags=(), **settings) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "megasched", "launch", kind, *options, "--dir", str(folder / kind), "--"]
    command += ["pretrain_gpt.py", *FLAGS, *flags, "--hf-model", tiny.save("llama", folder / "model")]
    command += ["--save", str(folder / kind / "checkpoints"), "--data-cache-path", str(folder / "cache")]
    return subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **settings
    )


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
    process = launch("local", folder, "--ranks", "2")
    out, _ = process.communicate(timeout=200)
    assert process.returncode == 0, out[-5000:]
    assert "pretrain_gpt.py on 2 ranks of this machine: TP2, 2 micro-batches" in out
    return RunFolder(folder / "local")


def test_a_rehearsal_comes_to_its_end_and_has_a_status(undisturbed):
    found = RunReader(str(undisturbed.path)).look()
    assert (found.state, found.iteration, found.restarts, found.gpus) == ("finished", ITERATIONS, 0, 2)
    assert found.saved.iteration == ITERATIONS
    assert set(iterations(undisturbed, 0, "local")) == set(range(1, ITERATIONS + 1))


def test_a_killed_rank_is_followed_by_a_restart_from_the_checkpoint(folder, undisturbed, tmp_path):
    run = RunFolder(folder / "torchrun")
    process = launch(
        "torchrun",
        folder,
        *("--hosts", "localhost,127.0.0.1", "--gpus-per-node", "1", "--interface", "lo", "--no-check"),
        flags=["--rehearse"],
        env=hosts.add_ssh(tmp_path / "bin"),
    )
    try:
        end = time.monotonic() + 120
        while max(iterations(run, 0), default=0) < 2 * SAVE_INTERVAL + 2:
            assert time.monotonic() < end
            assert process.poll() is None, process.stdout.read()
            time.sleep(0.02)
        os.kill(_rank_on(run, node=1), signal.SIGKILL)
        out, _ = process.communicate(timeout=150)
    finally:
        process.terminate()
    assert process.returncode == 0, out[-5000:]
    assert "127.0.0.1 ended with status 137" in out
    assert "it ended with status 137: it is started again" in out

    before, after = iterations(run, 0), iterations(run, 1)
    assert min(after) % SAVE_INTERVAL == 1
    assert 2 * SAVE_INTERVAL < min(after) <= max(before) + 1
    expected = iterations(undisturbed, 0, "local")
    for found in (before, after):
        for number, iteration in enumerate(sorted(found)):
            assert found[iteration][1] == pytest.approx(expected[iteration][1], abs=0.0015)
            if number != 1:  # Megatron's second line of a process holds a mean with the first one in it
                assert found[iteration][0] == pytest.approx(expected[iteration][0], rel=2e-6)
    assert set(before) | set(after) == set(expected)
    status = RunReader(str(run.path)).look()
    assert (status.state, status.iteration, status.restarts) == ("finished", ITERATIONS, 1)


def _rank_on(run: RunFolder, node: int) -> int:
    """The process id of a host's rank."""
    job = TorchrunJob(
        run_folder=run.path, directory=ROOT, gpus_per_node=1, script="pretrain_gpt.py", flags=(), python=""
    )
    found = hosts.processes(job.run_id)
    (rank,) = [
        process
        for process, words in found.items()
        if words[1:2] == ["-u"] and f"\0RANK={node}\0" in Path(f"/proc/{process}/environ").read_text()
    ]
    return rank
