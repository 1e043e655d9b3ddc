"""A checkpoint that is damaged or another model's: refused with file and tensor, for a run and for an export."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from megasched.errors import CheckpointError
from megasched.language.parallel_dims import ParallelDims
from megasched.reading.tracker import RELEASE, TRACKER
from megasched.trainer.checkpoint.load_check import check
from megasched.trainer.session import open_session
from megasched.weights.lazy import Narrowed
from megasched.weights.torch_dist.reader import TorchDist, checkpoint_folder
from tests.faults.checkpoints import changed_bytes, exported, flipped, imported, rewritten, weights
from tests.weights.test_traced_functions import InMemory

NAME = "model.layers.1.mlp.up_proj.weight"
FILE = "__0_0.distcp"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("damaged")


@pytest.fixture(scope="module")
def model(folder) -> str:
    return weights("llama", folder / "model")


@pytest.fixture(scope="module")
def good(folder, model) -> Path:
    return imported(model, folder / "good")


@pytest.fixture(scope="module")
def session(model):
    """At TP2, with the vocabulary padded."""
    layout = ParallelDims(tensor_model_parallel_size=2)
    return open_session("auto", model, layout, make_vocab_size_divisible_by=4)


@pytest.fixture
def refused(session, model, tmp_path):
    """Both ways to use a checkpoint refuse it with the same words."""

    def use(load: Path, *said: str) -> None:
        with pytest.raises(CheckpointError) as by_a_run:
            check(load, session, starts_anew=False)
        with pytest.raises(CheckpointError) as by_export:
            exported(load, tmp_path / "exported", model)
        for text in said:
            assert text in str(by_a_run.value)
            assert text in str(by_export.value)
        assert not (tmp_path / "exported").exists()

    return use


def test_a_good_one_is_taken(good, session, model, tmp_path):
    check(good, session, starts_anew=False)
    read = TorchDist(checkpoint_folder(good))
    assert read.unreadable() == []
    assert (exported(good, tmp_path / "exported", model) / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("file", "change", "said"),
    [
        (f"{RELEASE}/{FILE}", lambda content: content[:-100], f"{FILE} has "),
        (
            f"{RELEASE}/.metadata",
            lambda content: content[:-100],
            "expected the metadata of a torch_dist checkpoint",
        ),
        (f"{RELEASE}/.metadata", lambda content: b"", ".metadata: can't be read: EOFError; expected the metadata"),
        (f"{RELEASE}/metadata.json", lambda content: content[:-1], "; expected JSON with a sharded_backend"),
        (TRACKER, lambda content: b"1x", f"{TRACKER}: found '1x'; expected an iteration or `{RELEASE}`"),
        (TRACKER, lambda content: b"7", "iter_0000007: no complete checkpoint: metadata.json"),
    ],
)
def test_a_damaged_file_is_named(good, refused, file, change, said):
    with changed_bytes(good / file, change):
        refused(good, said)


@pytest.mark.parametrize(
    ("file", "said"), [("metadata.json", "release: no complete checkpoint"), (FILE, f"{FILE} is missing")]
)
def test_a_missing_file_is_named(good, refused, tmp_path, file, said):
    shutil.copytree(good, tmp_path / "copy")
    (tmp_path / "copy" / RELEASE / file).unlink()
    refused(tmp_path / "copy", said)


def test_a_flipped_byte_in_the_metadata_is_refused_or_harmless(good, session):
    """All over the file: it ends in an error that is ours, or says what the file has said before."""
    path = good / RELEASE / ".metadata"
    before = TorchDist(good / RELEASE).tensors
    refusals = 0
    for at in range(0, path.stat().st_size, 23):
        with changed_bytes(path, lambda content, at=at: flipped(content, at)):
            try:
                check(good, session, starts_anew=False)
            except CheckpointError:
                refusals += 1
                continue
            after = TorchDist(good / RELEASE).tensors
            assert {name: tensor.shape for name, tensor in after.items()} == {
                name: tensor.shape for name, tensor in before.items()
            }
    assert refusals > 50


def test_a_flipped_byte_in_what_describes_a_tensor_is_found(good, model, tmp_path):
    """The metadata alone does not show it; both name file and tensor when they come to it."""
    (chunk,) = TorchDist(good / RELEASE).tensors[NAME].chunks
    said = f"{FILE}, tensor {NAME}: can't be read"
    with changed_bytes(good / RELEASE / FILE, lambda content: flipped(content, chunk.offset)):
        (found,) = TorchDist(good / RELEASE).unreadable()
        assert said in found
        with pytest.raises(CheckpointError, match=said.replace(".", r"\.")):
            exported(good, tmp_path / "exported", model)
    assert not list(tmp_path.iterdir())


def test_every_name_that_does_not_fit_is_listed(good, refused, tmp_path):
    def change(tensors):
        tensors["model.layers.9.extra.weight"] = tensors["model.norm.weight"]
        del tensors["model.norm.weight"]
        del tensors["model.layers.0.self_attn.q_proj.weight"]
        return tensors

    refused(
        rewritten(good, tmp_path / "other", change),
        "missing (2):\n    model.layers.0.self_attn.q_proj.weight\n    model.norm.weight\n",
        "unexpected (1):\n    model.layers.9.extra.weight",
    )


def test_adapters_without_their_schedule_are_named_as_such(good, session, tmp_path):
    """A list of tensors alone does not say that the schedule with LoRA is missing."""

    def adapted(tensors):
        norm = tensors["model.norm.weight"]
        return tensors | {f"model.layers.0.self_attn.q_proj.lora_{one}.weight": norm for one in "AB"}

    with pytest.raises(CheckpointError) as caught:
        check(rewritten(good, tmp_path / "adapted", adapted), session, starts_anew=False)
    assert "unexpected (2):\n    model.layers.0.self_attn.q_proj.lora_A.weight" in str(caught.value)
    assert str(caught.value).endswith(
        "remedy: it has 1 LoRA adapters, and this schedule makes none: give the --model-schedule that it was "
        "trained with; or merge them, by `megasched export`"
    )


def test_another_shape_is_listed(good, refused, tmp_path):
    def change(tensors):
        return tensors | {NAME: Narrowed(tensors[NAME], 0, 0, 40)}

    refused(rewritten(good, tmp_path / "other", change), f"{NAME}: [40, 32]", "[48, 32]")


def test_another_architecture_is_refused(refused, tmp_path):
    other = imported(weights("gpt2", tmp_path / "gpt2"), tmp_path / "ckpt")
    refused(other, f"    {NAME}\n", "    transformer.h.3.mlp.c_fc.weight\n")


@pytest.mark.parametrize("size", [98, 100, 104, 128])
def test_another_vocabulary_is_refused(refused, tmp_path, size):
    """Imported weights are not padded, so that not one row too many is padding."""
    other = imported(weights("llama", tmp_path / "model", vocab_size=size), tmp_path / "ckpt")
    refused(other, "of another shape", f"model.embed_tokens.weight: [{size}, 32]", f"lm_head.weight: [{size}, 32]")


def test_nan_in_a_weight_is_named_by_export(good, model, tmp_path):
    values = torch.zeros(48, 32)
    values[47, 31] = float("nan")
    other = rewritten(good, tmp_path / "other", lambda tensors: tensors | {NAME: InMemory(values, [])})
    with pytest.raises(CheckpointError, match=rf"{FILE}: tensor {NAME} has NaN in it"):
        exported(other, tmp_path / "exported", model)
    assert [path.name for path in tmp_path.iterdir()] == ["other"]
