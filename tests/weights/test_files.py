"""What is copied beside weights: files of the folder, never what links in it lead to."""

from __future__ import annotations

import os

import pytest

from megasched.errors import ConfigError
from megasched.reading.tracker import RELEASE
from megasched.weights.exporting import export_weights
from megasched.weights.hf.files import copy_hf_files
from megasched.weights.torch_dist.reader import HF_FILES
from tests.faults.checkpoints import imported, silent, weights

SECRET = "-----BEGIN OPENSSH PRIVATE KEY-----"


@pytest.fixture
def secret(tmp_path):
    (tmp_path / "home").mkdir()
    path = tmp_path / "home" / "id_rsa"
    path.write_text(SECRET)
    return path


@pytest.fixture
def folder(tmp_path):
    found = tmp_path / "model"
    found.mkdir()
    (found / "tokenizer.json").write_text("{}")
    return found


def copied(source, tmp_path):
    target = tmp_path / "copied"
    target.mkdir()
    copy_hf_files(source, target)
    return sorted(path.name for path in target.iterdir())


def test_links_to_elsewhere_are_left_out_and_named(folder, secret, tmp_path, capsys):
    (folder / "merges.txt").symlink_to(secret)
    (folder / "vocab.json").symlink_to("../home/id_rsa")
    (folder / "chat_template.jinja").symlink_to("tokenizer.json")
    os.mkfifo(folder / "modeling.py")
    assert copied(folder, tmp_path) == ["chat_template.jinja", "tokenizer.json"]
    assert capsys.readouterr().err.splitlines() == [
        f"megasched: warning: {folder}/{name} is a link to {target}, outside of {folder}: it is not copied"
        for name, target in (("merges.txt", secret), ("vocab.json", "../home/id_rsa"))
    ]


def test_a_folder_that_is_a_link_is_the_users_own_choice(folder, tmp_path):
    (tmp_path / "link").symlink_to(folder)
    assert copied(tmp_path / "link", tmp_path) == ["tokenizer.json"]


def test_the_hub_keeps_the_contents_of_a_models_files_beside_its_revisions(secret, tmp_path):
    model = tmp_path / "hub" / "models--me--it"
    revision = model / "snapshots" / "0a1b"
    revision.mkdir(parents=True)
    (model / "blobs").mkdir()
    (model / "blobs" / "77").write_text("{}")
    (revision / "tokenizer.json").symlink_to("../../blobs/77")
    (revision / "merges.txt").symlink_to(secret)
    assert copied(revision, tmp_path) == ["tokenizer.json"]


def test_an_export_holds_nothing_from_outside_of_the_checkpoint(secret, tmp_path, capsys):
    checkpoint = imported(weights("llama", tmp_path / "model"), tmp_path / "save")
    hf_files = checkpoint / RELEASE / HF_FILES
    (hf_files / "tokenizer.json").symlink_to(secret)
    export_weights(checkpoint, tmp_path / "out", progress=silent, max_shard_size=1 << 30)
    assert not (tmp_path / "out" / "tokenizer.json").exists()
    assert all(SECRET.encode() not in path.read_bytes() for path in (tmp_path / "out").iterdir())
    assert f"is a link to {secret}" in capsys.readouterr().err
    hf_files.rename(tmp_path / "elsewhere")
    hf_files.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=f"{HF_FILES}: it is a link out of the checkpoint"):
        export_weights(checkpoint, tmp_path / "again", progress=silent, max_shard_size=1 << 30)
