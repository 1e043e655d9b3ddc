"""Hub ids: what is asked of the hub, and what is said when it does not answer."""

from __future__ import annotations

from pathlib import Path

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from megasched.errors import ConfigError
from megasched.weights.hf.hub import known_folder, local_folder


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


def test_a_hub_out_of_reach_is_told(monkeypatch):
    def download(name, allow_patterns):
        raise LocalEntryNotFoundError("no route\nmore")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(ConfigError, match=r"some/model: no folder .*, and the hub did not give it: no route$"):
        local_folder("some/model")


def test_what_lies_here_is_found_without_the_hub(monkeypatch, tmp_path):
    """As huggingface_hub keeps files: by the commit that a name refers to."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("socket.socket.connect", lambda *address: pytest.fail("the network was asked"))
    assert known_folder("some-team/some-model") == Path("some-team/some-model")
    kept = tmp_path / "models--some-team--some-model"
    snapshot = kept / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (kept / "refs").mkdir()
    (kept / "refs" / "main").write_text("0" * 40)
    assert known_folder("some-team/some-model") == snapshot
    assert known_folder(tmp_path) == tmp_path
    assert known_folder("no id/at/all") == Path("no id/at/all")
