"""What the trainer saves appears whole, and only while no later run has taken the folder over."""

from __future__ import annotations

from functools import wraps
from pathlib import Path

import pytest
import torch

from megasched.trainer.checkpoint.save_claim import FOLDER, Owner, SaveClaim
from megasched.verify import trainer_run
from megasched.verify.ranks.pool import RankError
from megasched.verify.trainer_run import train
from megasched.weights.inspection import inspect_checkpoint
from tests import tiny
from tests.parity.cases import slow
from tests.parity.steps import assert_same_run

FLAGS = ["--tensor-model-parallel-size", "2", "--use-distributed-optimizer", "--ckpt-format", "torch_dist"]
FLAGS += ["--override-opt-param-scheduler"]
TRACKER = "latest_checkpointed_iteration.txt"


def saving(save, *more):
    return [*FLAGS, "--save", str(save), "--save-interval", "1", *more]


# Without the worker Megatron saves at once.
ASYNC = ["--async-save", "--use-persistent-ckpt-worker"]


def count_forked(folder, flags, iterations, without=()):
    """Trains, without some of the flags that every run has; how many saves have run in processes of their own."""
    from megatron.core.dist_checkpointing.strategies.async_utils import TemporalAsyncCaller

    pids, real, given = [], TemporalAsyncCaller.schedule_async_call, [*trainer_run.RUN_FLAGS]

    def schedule(self, request):
        real(self, request)
        pids.append(self.process.pid)

    TemporalAsyncCaller.schedule_async_call = schedule
    trainer_run.RUN_FLAGS[:] = [word for word in given if word not in without]
    try:
        train(folder, flags, iterations=iterations)
    finally:
        TemporalAsyncCaller.schedule_async_call = real
        trainer_run.RUN_FLAGS[:] = given
    return len(set(pids))


@pytest.mark.parametrize("kind", [[], ASYNC], ids=["at-once", "async"])
def test_saved_aside_and_published(ranks, tmp_path, kind):
    folder, save = tiny.save("llama", tmp_path / "model"), tmp_path / "ckpt"
    whole = ranks.run(2, train, folder, FLAGS, iterations=4)
    forked = ranks.run(2, count_forked, folder, saving(save, *kind), iterations=2)
    assert forked == [2 if kind else 0] * 2
    assert sorted(path.name for path in save.iterdir()) == ["iter_0000001", "iter_0000002", TRACKER]
    assert (save / TRACKER).read_text() == "2"
    assert (save / "iter_0000002" / "metadata.json").is_file()
    resumed = ranks.run(2, train, folder, saving(save, "--load", str(save), *kind), iterations=4)
    assert_same_run(resumed, whole, skip=2, tp=2, of_tp=2, atol=1e-6)
    assert not (save / FOLDER).exists()


def test_an_iteration_that_is_saved_again_while_it_is_being_saved(ranks, tmp_path):
    """Megatron saves once more before the batch grows (training.py:3756), at the same iteration."""
    folder, save = tiny.save("llama", tmp_path / "model"), tmp_path / "ckpt"
    flags = [*FLAGS, "--save", str(save), "--save-interval", "2", *ASYNC]
    flags += ["--step-batch-size-schedule", "0:4 128:10"]
    one_size = ("--global-batch-size", "8")
    assert ranks.run(2, count_forked, folder, flags, iterations=4, without=one_size) == [3, 3]
    assert sorted(path.name for path in save.iterdir()) == ["iter_0000002", "iter_0000004", TRACKER]
    for iteration in (2, 4):
        assert inspect_checkpoint(save / f"iter_{iteration:07d}").problems == []


def test_old_checkpoints_are_removed_once_a_new_one_is_there(ranks, tmp_path):
    folder, save = tiny.save("llama", tmp_path / "model"), tmp_path / "ckpt"
    ranks.run(2, train, folder, saving(save, "--save-retain-interval", "2"), iterations=5)
    assert sorted(path.name for path in save.iterdir()) == [
        *("iter_0000002", "iter_0000004", "iter_0000005", TRACKER),
    ]


def test_a_checkpoint_that_does_not_stay_leaves_no_folder_beside_those_that_do(ranks, tmp_path):
    folder, save = tiny.save("llama", tmp_path / "model"), tmp_path / "ckpt"
    flags = [*FLAGS, "--save", str(save), "--save-interval", "4"]
    flags += ["--non-persistent-save-interval", "1", "--non-persistent-ckpt-type", "global"]
    ranks.run(2, train, folder, flags, iterations=5)
    assert sorted(path.name for path in save.iterdir()) == [
        *("iter_0000004", "iter_0000005", TRACKER, "non_persistent"),
    ]
    assert (save / "non_persistent" / TRACKER).read_text() == "5"


def train_until_taken_over(folder, flags, save, at):
    """Trains; before step ``at``, rank 0's folder is taken over as a requeued job does."""
    from megatron.training import training

    step = training.train_step

    @wraps(step)
    def wrapped(*given, **named):
        if named["iteration"] == at and torch.distributed.get_rank() == 0:
            SaveClaim(Path(save), Owner("7", 1, "node2", 1, 0.0))
        return step(*given, **named)

    training.train_step = wrapped
    try:
        return train(folder, flags, iterations=5)
    finally:
        training.train_step = step


@pytest.mark.parametrize("kind", [slow([]), ASYNC], ids=["at-once", "async"])
def test_a_run_whose_folder_was_taken_over_ends_and_changes_nothing(ranks, tmp_path, kind):
    folder, save = tiny.save("llama", tmp_path / "model"), tmp_path / "ckpt"
    with pytest.raises(RankError, match="another run has taken this folder over: Slurm job 7, restart 1"):
        ranks.run(2, train_until_taken_over, folder, saving(save, *kind), save=save, at=3)
    assert (save / TRACKER).read_text() in ("2", "3")  # an asynchronous save may have been under way
    names = sorted(path.name for path in save.iterdir() if any(path.iterdir() if path.is_dir() else [1]))
    assert names == [FOLDER, *(f"iter_{n:07d}" for n in range(1, int((save / TRACKER).read_text()) + 1)), TRACKER]


def test_a_folder_that_cannot_be_written_is_told_on_every_rank(ranks, tmp_path):
    folder = tiny.save("llama", tmp_path / "model")
    (tmp_path / "file").write_text("")
    with pytest.raises(RankError, match=r"--save .*file/ckpt: it can't be written to: .*Not a directory"):
        ranks.run(2, train, folder, saving(tmp_path / "file" / "ckpt"), iterations=1)
