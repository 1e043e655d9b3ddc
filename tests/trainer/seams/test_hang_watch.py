"""Two ranks of which one hangs: both say where they are, and the run ends."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megasched.trainer.hang_watch import minutes
from tests import tiny

ROOT = Path(__file__).parents[3]
# Steps have time enough on any machine, but for the third: its limit is set in the last forward of the second.
SCHEDULE = """
import os, time
from megasched.trainer.seams import hang_watch

calls = []

def stand_still(module, inputs):
    calls.append(1)
    if len(calls) == 4:
        print("the limit is", hang_watch._watches[0].seconds, flush=True)
        hang_watch._watches[0].seconds -= 5994
    if len(calls) == 5 and os.environ["RANK"] == "1":
        wait_forever()

def wait_forever():
    time.sleep(600)

def schedule(sch, layout):
    sch["model.layers.1.mlp"].hook("fw_pre", stand_still)
"""
FLAGS = """--rehearse --hf-random-init --tensor-model-parallel-size 2 --seq-length 16 --micro-batch-size 1
--global-batch-size 2 --train-iters 10 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 99
--make-vocab-size-divisible-by 4 --eval-iters 0 --log-interval 1 --num-dataset-builder-threads 1
--allow-unverified --hang-timeout-minutes"""


def run(tmp_path, limit):
    (tmp_path / "schedule.py").write_text(SCHEDULE)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    command += ["--log-dir", str(tmp_path / "logs"), "--redirects=3"]
    command += ["-m", "megasched", "pretrain_gpt.py", "--model-schedule", str(tmp_path / "schedule.py")]
    command += ["--hf-model", tiny.save("llama", tmp_path / "model"), *FLAGS.split(), limit]
    command += ["--data-cache-path", str(tmp_path / "cache")]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)


def said(tmp_path, rank, stream):
    return next((tmp_path / "logs").glob(f"**/{rank}/{stream}.log")).read_text()


def test_all_ranks_say_where_they_hang(tmp_path):
    found = run(tmp_path, "100")
    assert found.returncode == 1
    waits, hangs = (said(tmp_path, rank, "stderr") for rank in (0, 1))
    assert "Timeout (0:00:06)!" in waits, waits[-3000:]
    assert "in broadcast" in waits
    assert "Timeout (0:00:06.250000)!" in hangs, hangs[-3000:]
    assert "in wait_forever" in hangs
    assert "SIGALRM" in found.stderr
    shown = said(tmp_path, 0, "stdout") + said(tmp_path, 1, "stdout")
    assert "the limit is 6000.0\n" in shown
    assert "the limit is 6000.25\n" in shown
    assert "iteration        2/      10" in shown
    assert "iteration        3/      10" not in shown


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "soon"])
def test_minutes_are_positive(text):
    with pytest.raises(argparse.ArgumentTypeError, match="no positive number of minutes"):
        minutes(text)


def test_a_fraction_is_a_number_of_minutes():
    assert minutes("2.5") == 2.5
