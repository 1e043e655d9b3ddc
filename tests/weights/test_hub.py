"""Hub ids: what is asked of the hub, and what is said when it does not answer."""

from __future__ import annotations

from pathlib import Path

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from megasched.errors import ConfigError
from megasched.language.parallel_dims import ParallelDims
from megasched.verify.steps import make_subject
from megasched.weights.exporting import export_weights
from megasched.weights.hf.hub import known_folder, local_folder
from tests.faults.checkpoints import imported, silent, weights


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """What the hub is asked for; it gives ``tmp_path``."""
    calls = []

    def download(name, allow_patterns):
        calls.append((name, allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    return calls


def test_a_folder_is_itself_and_the_hub_is_not_asked(tmp_path, asked):
    assert local_folder(str(tmp_path)) == tmp_path
    assert asked == []


def test_an_id_is_downloaded_without_pickles(tmp_path, asked):
    assert local_folder("some-team/some-model") == tmp_path
    [(name, patterns)] = asked
    assert name == "some-team/some-model"
    assert "*.safetensors" in patterns
    assert not [pattern for pattern in patterns if pattern.endswith((".bin", ".pt"))]
    local_folder("some-team/some-model", weights=False)
    assert set(patterns) - set(asked[1][1]) == {"*.safetensors"}


def test_a_hub_out_of_reach_is_told(monkeypatch):
    def download(name, allow_patterns):
        raise LocalEntryNotFoundError("no route\nmore")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(ConfigError, match=r"some/model: no folder .*, and the hub did not give it: no route$"):
        local_folder("some/model")


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """Where huggingface_hub keeps files, by the commit that a name refers to; empty. Nothing else is asked."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("socket.socket.connect", lambda *address: pytest.fail("the network was asked"))
    return tmp_path / "hub"


def snapshot_in(cache):
    """The folder of ``some-team/some-model`` in the cache."""
    kept = cache / "models--some-team--some-model"
    snapshot = kept / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (kept / "refs").mkdir()
    (kept / "refs" / "main").write_text("0" * 40)
    return snapshot


def test_what_goes_along_with_an_export_may_be_named_by_an_id(cache, tmp_path):
    snapshot = snapshot_in(cache)
    model = weights("llama", snapshot)
    (snapshot / "tokenizer.json").write_text("{}")
    options = {"progress": silent, "max_shard_size": 1 << 30}
    export_weights(
        imported(model, tmp_path / "ckpt"), tmp_path / "out", hf_model="some-team/some-model", **options
    )
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
    ]


def test_a_model_verified_as_it_is_has_the_weights_of_its_id(cache, tmp_path):
    snapshot = snapshot_in(cache)
    weights("llama", snapshot)
    options = {"full_size": True, "layers": None, "overrides": (), "trust_remote_code": False}
    found = make_subject("some-team/some-model", tmp_path / "model", ParallelDims(), **options)
    assert found.weights is None
    assert (tmp_path / "model" / "model.safetensors").resolve() == snapshot / "model.safetensors"
    (snapshot / "model.safetensors").rename(snapshot / "pytorch_model.bin")
    found = make_subject(str(snapshot), tmp_path / "pickled", ParallelDims(), **options)
    assert found.weights is None  # but those of the folder, which are refused when they are read


def test_what_lies_here_is_found_without_the_hub(cache, tmp_path):
    assert known_folder("some-team/some-model") == Path("some-team/some-model")
    snapshot = snapshot_in(cache)
    (snapshot / "config.json").write_text("{}")
    assert known_folder("some-team/some-model") == snapshot
    assert known_folder(tmp_path) == tmp_path
    assert known_folder("no id/at/all") == Path("no id/at/all")
