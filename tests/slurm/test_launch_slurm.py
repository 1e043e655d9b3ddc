"""``megasched launch slurm`` in front of a real Slurm: what is placed where, and what is refused."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from tests import tiny
from tests.slurm.lab import Lab
from tests.slurm.training import LONG

# In Python's place: it writes down where it is, and what it was to run.
STUB = """#!/usr/bin/env bash
{ hostname; env; } >"$0.$SLURM_PROCID.env"
printf '%s\\n' "$@" >"$0.$SLURM_PROCID.words"
"""


@pytest.fixture
def stub(tmp_path) -> Path:
    path = tmp_path / "python"
    path.write_text(STUB)
    path.chmod(0o755)
    return path


def launch(lab: Lab, *words: str, seconds: float = 200):
    return lab.run(sys.executable, "-m", "megasched", "launch", "slurm", *map(str, words), seconds=seconds)


def submitted(lab: Lab, *words: str) -> int:
    run = launch(lab, "--json", *words)
    assert run.returncode == 0, run.stderr
    (job,) = json.loads(run.stdout)["jobs"]
    return int(job)


def told_by(stub: Path) -> dict[int, dict[str, str]]:
    """Task -> its environment, its hostname as HOST."""
    found = {}
    for path in stub.parent.glob(f"{stub.name}.*.env"):
        host, *lines = path.read_text().splitlines()
        found[int(path.name.split(".")[-2])] = {
            **dict(line.split("=", 1) for line in lines if "=" in line),
            "HOST": host,
        }
    return found


def test_64_tasks_are_where_they_must_be(lab, stub, tmp_path):
    given = ("--no-check", "--python", stub, "--dir", tmp_path / "run", "--nodes", 8, "--cpus-per-gpu", 8)
    job = submitted(lab, *given, "--env", "MINE=a b", "--", "pretrain_gpt.py", "--lr", "1e-3")
    lab.wait(job, "COMPLETED")
    found = told_by(stub)
    assert sorted(found) == list(range(64))
    (port,) = {one["MASTER_PORT"] for one in found.values()}
    assert 20000 <= int(port) < 30000
    for task, one in found.items():
        assert one["RANK"] == str(task)
        assert one["HOST"] == f"node{task // 8 + 1}"
        assert one["LOCAL_RANK"] == str(task % 8)
        assert one["WORLD_SIZE"] == "64"
        assert one["MASTER_ADDR"] == "node1"
        assert one["CUDA_VISIBLE_DEVICES"] == "0,1,2,3,4,5,6,7"
        assert one["MINE"] == "a b"
    words = Path(f"{stub}.63.words").read_text().splitlines()
    assert words == ["-u", "-m", "megasched", "pretrain_gpt.py", "--lr", "1e-3"]


def test_torchrun_is_started_once_a_node(lab, stub, tmp_path):
    given = ("--no-check", "--python", stub, "--dir", tmp_path / "run", "--nodes", 8, "--torchrun")
    lab.wait(submitted(lab, *given, "--", "pretrain_gpt.py"), "COMPLETED")
    found = told_by(stub)
    assert {task: one["HOST"] for task, one in found.items()} == {n: f"node{n + 1}" for n in range(8)}
    for task in found:
        words = Path(f"{stub}.{task}.words").read_text().splitlines()
        assert {"--nnodes=8", "--nproc-per-node=8"} <= set(words)
        assert any(word.startswith("--rdzv-endpoint=node1:") for word in words)


# What is wrong -> the options that make it so, and what is said.
WRONG = {
    "partition": (("--partition", "nowhere"), "invalid partition specified: nowhere"),
    "gpus": (("--gpus-per-node", "9"), "Requested node configuration is not available"),
    "nodes": (("--nodes", "9"), "Requested node configuration is not available"),
    "type": (("--sbatch=--gres=gpu:a100:8",), "Invalid GRES specification"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_the_cluster_has_not_is_refused(lab, stub, tmp_path, name):
    options, said = WRONG[name]
    words = ("--no-check", "--dir", tmp_path / "run", "--nodes", "8", *options, "--", "pretrain_gpt.py")
    run = launch(lab, *words)
    assert run.returncode == 1
    assert "this job would fail, and was not submitted:" in run.stderr
    assert said in run.stderr
    assert not (tmp_path / "run").exists()
    assert not lab.run("squeue", "--noheader", check=True).stdout


def given(tmp_path: Path, *more: str) -> list[str]:
    model = tiny.save("llama", tmp_path / "model")
    own = ["--hf-model", model, "--data-cache-path", str(tmp_path / "cache"), "--save", str(tmp_path / "ckpt")]
    return [*LONG.flags, *own, *more]


def test_all_that_is_wrong_stands_on_one_screen(lab, tmp_path):
    flags = [flag for flag in given(tmp_path, "--data-path", str(tmp_path / "corpus")) if flag != "--mock-data"]
    flags += ["--num-virtual-stages-per-pipeline-rank", "2", "--global-batch-size", "3"]
    options = ("--nodes", "4", "--gpus-per-node", "1", "--partition", "nowhere", "--dir", tmp_path / "run")
    run = launch(lab, *options, "--", "pretrain_gpt.py", *flags)
    assert run.returncode == 1
    assert "--global-batch-size 3 gives each pipeline 3 micro-batches; interleaved ones (VPP 2)" in run.stderr
    assert f"no data at {tmp_path}/corpus: {tmp_path}/corpus.bin and {tmp_path}/corpus.idx missing" in run.stderr
    assert "invalid partition specified: nowhere" in run.stderr
    assert len(run.stderr.splitlines()) < 24
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("nodes", "more", "said"),
    [
        (3, (), "3 ranks are no multiple of TP 2 x PP 2 x CP 1"),
        # The others come to the same place by the same way; launch/test_checks.py has them without a cluster.
        *(
            pytest.param(4, more, said, marks=pytest.mark.slow)
            for more, said in (
                (("--global-batch-size", "3", "--micro-batch-size", "2"), "must be divisible by"),
                (("--hf-override", "hidden_size=48", "num_attention_heads=3", "num_key_value_heads=3"), "TP 2"),
                (("--no-such-flag",), "--no-such-flag: there is no such flag"),
            )
        ),
    ],
)
def test_a_layout_that_does_not_divide_is_refused(lab, tmp_path, nodes, more, said):
    options = ("--nodes", str(nodes), "--gpus-per-node", "1", "--dir", tmp_path / "run")
    run = launch(lab, *options, "--", "pretrain_gpt.py", *given(tmp_path, *more))
    assert run.returncode == 1
    assert said in run.stderr
    assert not lab.run("squeue", "--noheader", check=True).stdout


def test_a_full_disk_is_refused(lab, tmp_path):
    (tmp_path / "ckpt").mkdir()
    lab.run("mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", tmp_path / "ckpt", check=True)
    try:
        options = ("--nodes", "4", "--gpus-per-node", "1", "--dir", tmp_path / "run")
        run = launch(lab, *options, "--", "pretrain_gpt.py", *given(tmp_path))
    finally:
        lab.run("umount", tmp_path / "ckpt", check=True)
    assert run.returncode == 1
    assert re.search(r"a checkpoint takes \d+\.\d kB, and two of them must find room", run.stderr)
    assert f"262.1 kB are free at {tmp_path}/ckpt" in run.stderr
    assert not lab.run("squeue", "--noheader", check=True).stdout
