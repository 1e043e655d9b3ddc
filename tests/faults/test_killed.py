"""A rank that is killed: all others end, and the run goes on from the last checkpoint as if undisturbed."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch

from megasched.megatron.save_claim import FOLDER
from megasched.verify.trainer_run import losses, train
from megasched.weights.inspection import inspect_checkpoint
from tests import tiny
from tests.faults.runs import SAVING, SECONDS, TP2, run, tracked

FLAGS = [*TP2, *SAVING]
STOP, END = 2, 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("killed")


@pytest.fixture(scope="module")
def undisturbed(ranks, folder):
    """Of 6 iterations; a second run has saved after two of them."""
    model, save = tiny.save("llama", folder / "model"), folder / "ckpt"
    whole = ranks.run(2, train, model, FLAGS, iterations=END)
    ranks.run(2, train, model, [*FLAGS, "--save", str(save), "--save-interval", str(STOP)], iterations=STOP)
    return whole


@pytest.mark.parametrize(
    ("fault", "rank", "last"),
    [("killed_in_a_step", 1, 3), ("killed_in_its_tensors", 1, 4), ("killed_before_the_metadata", 0, 4)],
)
def test_a_killed_rank_ends_all_and_costs_no_checkpoint(ranks, folder, undisturbed, fault, rank, last):
    """Each fault meets what the one before it has left in the folder."""
    model, save = str(folder / "model"), folder / "ckpt"
    saving = [*FLAGS, "--hf-random-init", "--load", str(save), "--save", str(save), "--save-interval", str(STOP)]
    ended = run(folder, model, [*saving, "--train-iters", str(END)], fault=fault, rank=rank)
    assert ended.status == 128 + signal.SIGKILL
    assert ended.seconds < SECONDS
    assert max(ended.grad_norms) == last
    for iteration, norm in ended.grad_norms.items():
        assert norm == pytest.approx(undisturbed[0].grad_norms[iteration - 1], abs=0.0015)
    assert tracked(save) == str(STOP)
    published = [path.name for path in save.glob("iter_*") if any(path.iterdir())]
    assert published == [f"iter_{STOP:07d}"]
    if rank == 0:  # it had no time to clear away what it wrote aside: tensors of both ranks, and nothing more
        (aside,) = (save / FOLDER).glob("aside-*/iter_0000004")
        assert {path.suffix for path in aside.iterdir()} == {".distcp"}
    assert inspect_checkpoint(save).problems == []
    resumed = ranks.run(2, train, model, [*FLAGS, "--load", str(save)], iterations=END)
    torch.testing.assert_close(losses(resumed), losses(undisturbed)[STOP:], rtol=2e-6, atol=0)
