"""Hub ids: what is asked of the hub, and what is said when it does not answer."""

from __future__ import annotations

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from megasched.errors import ConfigError
from megasched.weights.hub import local_folder


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
