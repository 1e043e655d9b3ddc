"""Damage that a run of two ranks meets when it starts: it ends with a message that names it, on every rank."""

from __future__ import annotations

import json
import pickle
import re
from pathlib import Path

import pytest
import torch

from megasched.errors import CheckpointError
from megasched.reading.tracker import RELEASE
from megasched.verify.ranks.pool import RankError
from megasched.verify.trainer_run import train
from megasched.weights.torch_dist.reader import TorchDist
from tests.faults.checkpoints import changed_bytes, flipped, imported, rewritten, weights
from tests.faults.runs import ENDED_WITH_ANOTHER, PP2, SAVING, TP2, run
from tests.weights.test_traced_functions import InMemory

NAME = "model.layers.3.mlp.up_proj.weight"
HASHED = [*TP2, *SAVING, "--verify-integrity"]


def test_a_truncated_shard_that_one_stage_alone_reads(tmp_path):
    """The other stage has long read its own, and waits in the first communication: torchrun ends it, and the
    message is there once."""
    model = Path(weights("llama", tmp_path / "model", max_shard_size="20KB"))
    shard = json.loads((model / "model.safetensors.index.json").read_text())["weight_map"][NAME]
    with changed_bytes(model / shard, lambda content: content[:-100]):
        ended = run(tmp_path, str(model), [*PP2, "--train-iters", "2"])
    assert ended.status == 2
    assert ENDED_WITH_ANOTHER.search(ended.log), ended.log[-5000:]
    assert not ended.grad_norms
    for text in (f"megasched: error on rank 1: {model / shard}, tensor ", "can't be read as safetensors"):
        assert ended.log.count(text) == 1, ended.log[-5000:]


def test_a_checkpoint_that_lacks_names(ranks, tmp_path):
    model = weights("llama", tmp_path / "model")

    def change(tensors):
        return {name: tensor for name, tensor in tensors.items() if ".3.mlp." not in name}

    other = rewritten(imported(model, tmp_path / "good"), tmp_path / "other", change)
    with pytest.raises(RankError) as caught:
        ranks.run(2, train, model, [*TP2, *SAVING, "--load", str(other)], iterations=2, random_init=False)
    names = (f"    model.layers.3.mlp.{part}_proj.weight\n" for part in ("down", "gate", "up"))
    for text in (f"Error: the checkpoint {other / RELEASE} does not fit", "missing (3):", *names):
        assert str(caught.value).count(text) == 2


def test_a_damaged_chunk_is_named_on_every_rank(ranks, tmp_path):
    """Which Megatron finds while it loads; the metadata alone does not show it."""
    model = weights("llama", tmp_path / "model")
    save = imported(model, tmp_path / "ckpt")
    (chunk,) = TorchDist(save / RELEASE).tensors[NAME].chunks
    with (
        changed_bytes(chunk.path, lambda content: flipped(content, chunk.offset)),
        pytest.raises(RankError) as caught,
    ):
        ranks.run(2, train, model, [*TP2, *SAVING, "--load", str(save)], iterations=1, random_init=False)
    assert str(caught.value).count(f"\n{CheckpointError.__module__}.CheckpointError: {save}") == 2
    assert f"{chunk.path}, tensor {NAME}: can't be read" in str(caught.value)


@pytest.mark.parametrize("row", [1, -1])
def test_nan_in_a_checkpoint_is_named_on_every_rank(ranks, tmp_path, row):
    """Of TP0 alone, or of TP1 alone."""
    model = weights("llama", tmp_path / "model")
    good = imported(model, tmp_path / "good")

    def change(tensors):
        values = torch.zeros(tensors[NAME].shape)
        values[row, 3] = float("nan")
        return tensors | {NAME: InMemory(values, [])}

    other = rewritten(good, tmp_path / "other", change)
    with pytest.raises(RankError) as caught:
        ranks.run(2, train, model, [*TP2, *SAVING, "--load", str(other)], iterations=1, random_init=False)
    said = f"CheckpointError: {other / RELEASE}: the checkpoint can't be loaded:\n        {NAME} has NaN in it"
    assert re.sub(" +", " ", str(caught.value)).count(re.sub(" +", " ", said)) == 2


@pytest.fixture(scope="module")
def saved(ranks, tmp_path_factory) -> tuple[str, Path]:
    """A model, and the checkpoint of a run that hashed it."""
    folder = tmp_path_factory.mktemp("saved")
    model, save = weights("llama", folder / "model"), folder / "ckpt"
    ranks.run(2, train, model, [*HASHED, "--save", str(save), "--save-interval", "1"], iterations=1)
    return model, save


def test_an_optimizer_state_that_is_missing_is_named(ranks, saved):
    model, save = saved
    lacking = f"optimizer.state.exp_avg.{NAME}"

    def change(content: bytes) -> bytes:
        metadata = pickle.loads(content)
        del metadata.state_dict_metadata[lacking]
        return pickle.dumps(metadata)

    with (
        changed_bytes(save / "iter_0000001" / ".metadata", change),
        pytest.raises(RankError) as caught,
    ):
        ranks.run(2, train, model, [*TP2, *SAVING, "--load", str(save)], iterations=2)
    said = rf"CheckpointError: {save}: the checkpoint can't be loaded:\n    .*{lacking}"
    assert len(re.findall(said, str(caught.value))) == 2


def test_a_flipped_byte_in_the_values_is_found_by_megatrons_hashes(ranks, saved):
    """``--verify-integrity`` hashes what is written aside, and it is the same when it is published."""
    model, save = saved
    ranks.run(2, train, model, [*HASHED, "--load", str(save)], iterations=2)
    tensor = TorchDist(save / "iter_0000001").tensors[NAME]
    chunk = tensor.chunks[0]
    before = tensor.read(((0, 48), (0, 32)))
    with changed_bytes(chunk.path, lambda content: flipped(content, chunk.offset + chunk.length // 2)):
        assert TorchDist(save / "iter_0000001").unreadable() == []
        assert not tensor.read(((0, 48), (0, 32))).equal(before)
        with pytest.raises(RankError) as caught:
            ranks.run(2, train, model, [*HASHED, "--load", str(save)], iterations=2)
    said = f"CheckpointError: {save}: Checkpoint integrity verification failed for 1 file(s)"
    assert str(caught.value).count(said) == 2
    assert f"{chunk.path.name}: hash mismatch" in str(caught.value)
