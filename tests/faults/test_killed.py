"""A rank that is killed: all others end, and the run goes on from the last checkpoint as if undisturbed."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch

from megasched.trainer.checkpoint.save_claim import FOLDER
from megasched.verify.trainer_run import losses, train
from megasched.weights.inspection import inspect_checkpoint
from tests import tiny
from tests.faults.runs import ENDED_WITH_ANOTHER, SAVING, TP2, grad_norms, harmed, run, tracked

FLAGS = [*TP2, *SAVING]
STOP, END = 2, 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("killed")


@pytest.fixture(scope="module")
def undisturbed(ranks, folder):
    """Of 6 iterations; a second run has saved after two of them."""
    model, save = tiny.save("llama", folder / "model"), folder / "ckpt"
    whole = ranks.run(2, train, model, FLAGS, iterations=END, as_it_is=True)
    flags = [*FLAGS, "--save", str(save), "--save-interval", str(STOP)]
    ranks.run(2, train, model, flags, iterations=STOP, as_it_is=True)
    return whole


def assert_nothing_is_lost(ranks, folder, undisturbed, norms, last):
    """The iterations before the fault are right, the checkpoint before it is whole, and a run goes on from it."""
    save = folder / "ckpt"
    assert max(norms) == last
    for iteration, norm in norms.items():
        assert norm == pytest.approx(undisturbed[0].grad_norms[iteration - 1], abs=0.0015)
    assert tracked(save) == str(STOP)
    published = [path.name for path in save.glob("iter_*") if any(path.iterdir())]
    assert published == [f"iter_{STOP:07d}"]
    assert inspect_checkpoint(save).problems == []
    resumed = ranks.run(
        2, train, str(folder / "model"), [*FLAGS, "--load", str(save)], iterations=END, as_it_is=True
    )
    torch.testing.assert_close(losses(resumed), losses(undisturbed)[STOP:], rtol=2e-6, atol=0)


def saving(folder):
    save = str(folder / "ckpt")
    return [*FLAGS, "--load", save, "--save", save, "--save-interval", str(STOP)]


def test_a_rank_killed_in_a_step_ends_all_others(ranks, folder, undisturbed):
    flags = [*saving(folder), "--hf-random-init", "--train-iters", str(END)]
    ended = run(folder, str(folder / "model"), flags, fault="killed_in_a_step", rank=1)
    assert ended.status == 128 + signal.SIGKILL
    assert ENDED_WITH_ANOTHER.search(ended.log), ended.log[-5000:]
    assert_nothing_is_lost(ranks, folder, undisturbed, ended.grad_norms, last=3)


@pytest.mark.parametrize(("fault", "rank"), [("killed_in_its_tensors", 1), ("killed_before_the_metadata", 0)])
def test_a_rank_killed_in_a_save_costs_no_checkpoint(ranks, folder, undisturbed, fault, rank):
    """Each fault meets what the one before it has left in the folder."""
    said = harmed(ranks, str(folder / "model"), saving(folder), END, fault=fault, rank=rank)
    assert f"rank {rank} died with exit code -9" in said
    if rank == 0:  # it had no time to clear away what it wrote aside: tensors of both ranks, and nothing more
        (aside,) = (folder / "ckpt" / FOLDER).glob("aside-*/iter_0000004")
        assert {path.suffix for path in aside.iterdir()} == {".distcp"}
    assert_nothing_is_lost(ranks, folder, undisturbed, grad_norms(said), last=4)
