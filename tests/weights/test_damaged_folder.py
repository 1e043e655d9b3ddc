"""HFFolder against folders that are damaged, or hold no weights that are read."""

import json
import struct

import pytest

from megasched.definition.build import build_definition
from megasched.errors import CheckpointError
from megasched.plan.placement import Placement
from megasched.weights.hf.folder import HFFolder
from megasched.weights.hf.safetensors_files import has_weights
from tests.weights.test_folder import NAME


def damage_header(path):
    content = path.read_bytes()
    path.write_bytes(content[:8] + b"{broken" + content[15:])


def damage_length(path):
    path.write_bytes(struct.pack("<Q", 1 << 40) + path.read_bytes()[8:])


def cut_header(path):
    path.write_bytes(path.read_bytes()[:20])


def cut_data(path):
    path.write_bytes(path.read_bytes()[:-7])


def empty(path):
    path.write_bytes(b"")


@pytest.mark.parametrize("damage", [damage_header, damage_length, cut_header, cut_data, empty])
def test_damaged_files_are_named(tiny, trained, tmp_path, damage):
    definition = build_definition(tiny("llama"))
    trained(tiny("llama")).save_pretrained(tmp_path / "single")
    damage(tmp_path / "single" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"single/model\.safetensors: can't be read as safetensors"):
        HFFolder(tmp_path / "single", definition)
    trained(tiny("llama")).save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    source = HFFolder(tmp_path / "shards", definition)
    index = json.loads((tmp_path / "shards" / "model.safetensors.index.json").read_text())
    shard = index["weight_map"][NAME]
    damage(tmp_path / "shards" / shard)
    with pytest.raises(CheckpointError, match=rf"{shard}, tensor {NAME}: can't be read as safetensors"):
        source.local(Placement(NAME, (64, 32)), 0, 1)


def test_missing_shards_and_tensors_are_named(tiny, trained, tmp_path):
    definition = build_definition(tiny("llama"))
    trained(tiny("llama")).save_pretrained(tmp_path, max_shard_size="20KB")
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    shards = sorted(set(index["weight_map"].values()))
    other = next(shard for shard in shards if shard != index["weight_map"][NAME])
    path.write_text(json.dumps({"weight_map": index["weight_map"] | {NAME: other}}))
    with pytest.raises(CheckpointError, match=rf"{other}, tensor {NAME}: "):
        HFFolder(tmp_path, definition).local(Placement(NAME, (64, 32)), 0, 1)
    for shard in shards[:2]:
        (tmp_path / shard).unlink()
    with pytest.raises(CheckpointError, match=f"are missing: {shards[0]}, {shards[1]}"):
        HFFolder(tmp_path, definition)


def test_an_index_that_names_a_tensor_twice_is_refused(tiny, trained, tmp_path):
    trained(tiny("llama")).save_pretrained(tmp_path, max_shard_size="20KB")
    path = tmp_path / "model.safetensors.index.json"
    shards = sorted(set(json.loads(path.read_text())["weight_map"].values()))
    path.write_text(path.read_text().replace('"weight_map": {', f'"weight_map": {{"{NAME}": "{shards[-1]}",'))
    with pytest.raises(CheckpointError, match=rf"index\.json: .*named twice: {NAME}"):
        HFFolder(tmp_path, build_definition(tiny("llama")))


def test_an_index_that_names_files_elsewhere_is_refused(tiny, tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../b.safetensors"}}')
    with pytest.raises(CheckpointError, match=r"index\.json: names files outside of the folder: \.\./b"):
        HFFolder(tmp_path, build_definition(tiny("llama")))


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 3}}'])
def test_a_damaged_index_is_named(tiny, tmp_path, text):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"index\.json: .*; expected JSON with a weight_map"):
        HFFolder(tmp_path, build_definition(tiny("llama")))


def test_pickled_weights_are_refused(tiny, tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"never read")
    with pytest.raises(CheckpointError, match=r"it has pytorch_model\.bin\. Only safetensors are read"):
        HFFolder(tmp_path, build_definition(tiny("llama")))


def test_a_folder_without_weights_is_refused(tiny, tmp_path):
    with pytest.raises(CheckpointError, match="it has no weights"):
        HFFolder(tmp_path, build_definition(tiny("llama")))


@pytest.mark.parametrize(
    ("files", "answer"),
    [
        (["config.json"], False),
        (["config.json", "training_args.bin", "optimizer.pt", "tokenizer.model"], False),
        (["model.safetensors"], True),
        (["model.safetensors.index.json"], True),
        (["model-00001-of-00002.safetensors"], True),
        # Refused by HFFolder, but not to be mistaken for a folder that asks for random weights.
        (["pytorch_model.bin"], True),
        (["pytorch_model-00001-of-00002.bin"], True),
        (["tf_model.h5"], True),
    ],
)
def test_has_weights(tmp_path, files, answer):
    for name in files:
        (tmp_path / name).write_bytes(b"")
    assert has_weights(tmp_path) is answer


def test_has_weights_of_a_config_file_or_nothing(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert has_weights(tmp_path / "config.json") is False
    assert has_weights(tmp_path / "nowhere") is False
