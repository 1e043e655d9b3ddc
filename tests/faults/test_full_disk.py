"""A disk that fills while a checkpoint is written: what was complete stays, and nothing else is taken for it."""

from __future__ import annotations

import re

import pytest
import torch

from megasched.verify.ranks.pool import RankError
from megasched.verify.trainer_run import losses, train
from megasched.weights.inspection import inspect_checkpoint
from tests import tiny
from tests.faults.disks import resize
from tests.faults.runs import SAVING, TP2, grad_norms, run, tracked

FLAGS = [*TP2, *SAVING]


def out_of_room(ranks, disk, model, saving, save):
    """What ranks say whose second save finds the disk full, and all that they print."""
    ranks.run(2, train, model, saving, iterations=2)
    resize(disk, 200_000)
    with pytest.raises(RankError) as caught:
        ranks.run(2, train, model, [*saving, "--load", str(save)], iterations=6)
    said = re.findall(r"SaveError: (/.*No space left.*)", str(caught.value))
    assert said
    return said, str(caught.value)


def test_a_save_that_finds_no_room_ends_the_run(ranks, disk, tmp_path):
    model, save = tiny.save("llama", tmp_path / "model"), disk / "ckpt"
    saving = [*FLAGS, "--save", str(save), "--save-interval", "2"]
    said, printed = out_of_room(ranks, disk, model, saving, save)
    for text in said:
        assert text.startswith(f"{save}/iter_0000004 can't be saved: rank ")
        assert re.search(r"\[Errno 28\] No space left on device: '.*/iter_0000004/__[01]_\d+\.distcp'", text)
    assert max(grad_norms(printed)) == 4
    assert tracked(save) == "2"
    assert [path.name for path in save.glob("iter_*") if any(path.iterdir())] == ["iter_0000002"]
    assert inspect_checkpoint(save).problems == []
    resize(disk, 8_000_000)
    resumed = ranks.run(2, train, model, [*saving, "--load", str(save)], iterations=4)
    whole = ranks.run(2, train, model, FLAGS, iterations=4)
    torch.testing.assert_close(losses(resumed), losses(whole)[2:], rtol=2e-6, atol=0)
    assert tracked(save) == "4"


def test_a_save_in_the_background_that_finds_no_room_ends_the_run(ranks, disk, tmp_path):
    model, save = tiny.save("llama", tmp_path / "model"), disk / "ckpt"
    saving = [*FLAGS, "--save", str(save), "--save-interval", "2", "--async-save", "--use-persistent-ckpt-worker"]
    said, _ = out_of_room(ranks, disk, model, saving, save)
    assert said[0].startswith(f"{save}/iter_0000004 can't be saved: rank ")
    assert re.search(r"\[Errno 28\] No space left on device: '.*/iter_0000004/__[01]_\d+\.distcp'", said[0])
    assert tracked(save) == "2"


def test_a_disk_that_becomes_read_only_is_one_error_and_no_rank_is_left(disk, tmp_path, monkeypatch):
    model, save = tiny.save("llama", tmp_path / "model"), disk / "ckpt"
    monkeypatch.setenv("FAULT_DISK", str(disk))
    saving = [*FLAGS, "--save", str(save), "--save-interval", "2", "--train-iters", "6", "--hf-random-init"]
    ended = run(tmp_path, model, saving, fault="read_only_before_a_save")
    assert ended.status == 1
    assert "Traceback" not in ended.log
    said = re.findall(r"SaveError: .*", ended.log)
    assert len(said) == 1
    assert said[0].startswith(f"SaveError: {save}/iter_0000004 can't be saved: [Errno 30] Read-only file system")
    assert max(ended.grad_norms) == 4
    assert tracked(save) == "2"
