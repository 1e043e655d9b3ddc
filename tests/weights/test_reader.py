"""Checkpoints as torch writes and reads them; and every way in which one can be wrong."""

from __future__ import annotations

import io
import json
import os
import pickle
import warnings
from argparse import Namespace
from enum import Enum
from signal import Signals

import pytest
import torch
from torch.distributed import checkpoint as dcp

from megasched.errors import CheckpointError
from megasched.weights.lazy import whole
from megasched.weights.torch_dist.reader import TorchDist, checkpoint_folder
from megasched.weights.torch_dist.unpickling import Unpickler
from megasched.weights.torch_dist.writer import TorchDistWriter
from tests.weights.test_traced_functions import InMemory


def tensors():
    torch.manual_seed(3)
    return {
        "matrix": torch.randn(13, 7),
        "cube": torch.randn(4, 5, 6).bfloat16(),
        "vector": torch.arange(11),
        "number": torch.tensor(5.0),
        "empty": torch.empty(0, 3),
    }


@pytest.fixture
def written(tmp_path, monkeypatch):
    """A checkpoint of ours, in small chunks and several files."""
    from megasched.weights.torch_dist import writer as torch_dist_writer

    monkeypatch.setattr(torch_dist_writer, "CHUNK", 50)
    monkeypatch.setattr(torch_dist_writer, "FILE", 3000)
    writer = TorchDistWriter(tmp_path, lambda count: None)
    for key, value in tensors().items():
        writer.add(key, InMemory(value, []), value.dtype)
    writer.finish({"iteration": 7})
    return tmp_path


@pytest.fixture
def saved(tmp_path):
    """A checkpoint of torch's."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(tensors(), checkpoint_id=tmp_path, no_dist=True)
    (tmp_path / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    return tmp_path


def assert_holds_all(folder):
    found = TorchDist(checkpoint_folder(folder))
    expected = tensors()
    assert found.tensors.keys() == expected.keys()
    assert found.problems() == []
    for key, value in expected.items():
        tensor = found.tensors[key]
        assert (tensor.shape, tensor.dtype, tensor.nbytes) == (tuple(value.shape), value.dtype, value.nbytes)
        assert torch.equal(tensor.read(whole(tensor.shape)), value), key
    cube = found.tensors["cube"]
    for box in [
        ((1, 2), (2, 3), (1, 5)),
        ((0, 4), (1, 3), (0, 1)),
        ((3, 4), (0, 5), (2, 6)),
        ((2, 2), (0, 5), (0, 6)),
    ]:
        assert torch.equal(cube.read(box), expected["cube"][tuple(slice(a, b) for a, b in box)]), box


def test_what_torch_wrote_is_read(saved):
    assert_holds_all(saved)


def test_what_was_written_is_read(written):
    assert len(list(written.glob("*.distcp"))) > 2
    assert_holds_all(written)
    assert TorchDist(written).common == {"iteration": 7}


def test_a_chunk_is_written_without_the_rest_of_its_tensor(tmp_path, monkeypatch):
    from megasched.weights.torch_dist import writer as torch_dist_writer

    value = torch.zeros(10, 25_000)
    monkeypatch.setattr(torch_dist_writer, "CHUNK", value.nbytes // 10)
    writer = TorchDistWriter(tmp_path, lambda count: None)
    writer.add("matrix", InMemory(value, []), value.dtype)
    writer.finish({})
    assert sum(path.stat().st_size for path in tmp_path.glob("*.distcp")) < 1.1 * value.nbytes


def test_torch_reads_what_was_written(written):
    empty = {key: torch.zeros_like(value) for key, value in tensors().items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(empty, checkpoint_id=written, no_dist=True)
    for key, value in tensors().items():
        assert torch.equal(empty[key], value), key


def test_the_last_checkpoint_of_a_folder_is_found(tmp_path):
    for name, tracker in [("iter_0000012", "12"), ("release", "release\n")]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
        (tmp_path / "latest_checkpointed_iteration.txt").write_text(tracker)
        assert checkpoint_folder(tmp_path) == tmp_path / name
        assert checkpoint_folder(tmp_path / name) == tmp_path / name


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "no complete checkpoint: metadata.json, .* is missing .there is nothing"),
        ({"latest_checkpointed_iteration.txt": "12"}, "iter_0000012: no complete checkpoint"),
        ({"latest_checkpointed_iteration.txt": "../../x"}, "found '../../x'; expected an iteration or `release`"),
        (
            {".metadata": "", "__0_0.distcp": ""},
            "metadata.json, which Megatron writes last, is missing .it has .met",
        ),
        ({"metadata.json": '{"sharded_backend": "fsdp_dtensor"}'}, "--ckpt-format fsdp_dtensor; only torch_dist"),
        ({"mp_rank_00/model_optim_rng.pt": ""}, "written with --ckpt-format torch; only torch_dist"),
        ({"metadata.json": "{}"}, "expected JSON with a sharded_backend"),
    ],
)
def test_what_is_no_checkpoint_is_said_to_be_none(tmp_path, files, message):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    with pytest.raises(CheckpointError, match=message):
        checkpoint_folder(tmp_path)


class Attack:
    """What a pickle can do when it is loaded."""

    def __reduce__(self):
        return os.mkdir, ("attacked",)


def test_a_metadata_that_names_a_function_runs_nothing(written, monkeypatch):
    monkeypatch.chdir(written)
    (written / ".metadata").write_bytes(pickle.dumps(Attack()))
    with pytest.raises(CheckpointError, match=r"\.metadata: the checkpoint's pickle names posix\.mkdir"):
        TorchDist(written)
    assert not (written / "attacked").exists()


@pytest.mark.parametrize(
    "named",
    [
        *("torch load", "torch hub", "torch.serialization load", "torch._utils _import_dotted_name"),
        *("torch.distributed.checkpoint.filesystem FileSystemWriter", "torch.distributed.checkpoint.metadata os"),
        *("collections Counter", "argparse FileType", "pathlib Path"),
    ],
)
def test_of_modules_of_a_checkpoint_no_other_name_is_taken(named):
    module, name = named.split()
    with pytest.raises(CheckpointError, match=f"the checkpoint's pickle names {module}.{name}"):
        Unpickler(io.BytesIO(f"c{module}\n{name}\n.".encode())).load()


class Backend(Enum):
    flash = 1


def test_common_states_are_read_without_running_anything(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    writer = TorchDistWriter(tmp_path, lambda count: None)
    args = Namespace(tensor_model_parallel_size=2, backend=Backend.flash, dtype=torch.bfloat16, bad=Attack())
    writer.finish({"args": args, "iteration": 3, "signal": Signals.SIGTERM, "rates": [1e-3, None]})
    common = TorchDist(tmp_path).common
    assert common["iteration"] == 3
    assert common["rates"] == [1e-3, None]
    assert common["args"].tensor_model_parallel_size == 2
    assert common["args"].dtype is torch.bfloat16
    assert repr(common["args"].backend) == "Backend(1)"
    assert repr(common["args"].bad) == "mkdir('attacked')"
    assert repr(common["signal"]) == "Signals(15)"
    assert not (tmp_path / "attacked").exists()


def test_a_tensor_that_is_an_attack_is_refused(written, monkeypatch):
    monkeypatch.chdir(written)
    found = TorchDist(written).tensors["number"]
    chunk = found.chunks[0]
    attack = written / "attack"
    torch.save(Attack(), attack)
    content = bytearray(chunk.path.read_bytes())
    payload = attack.read_bytes()
    content[chunk.offset : chunk.offset + chunk.length] = payload.ljust(chunk.length, b"\0")[: chunk.length]
    chunk.path.write_bytes(content)
    with pytest.raises(CheckpointError, match="tensor number: can't be read"):
        found.read(())
    assert not (written / "attacked").exists()


def test_files_outside_of_the_checkpoint_are_not_read(written):
    content = (written / ".metadata").read_bytes()
    name = sorted(written.glob("*.distcp"))[0].name
    (written / ".metadata").write_bytes(content.replace(name.encode(), b"../" + name.encode()[3:]))
    with pytest.raises(CheckpointError, match="names a file outside of the checkpoint"):
        TorchDist(written)


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def test_a_file_cut_short_or_missing_is_named_with_its_tensor(written):
    chunk = TorchDist(written).tensors["matrix"].chunks[-1]
    last = chunk.path
    last.write_bytes(last.read_bytes()[: chunk.offset + 5])
    found = TorchDist(written)
    [problem] = found.problems()
    assert problem.startswith(f"{last} has {last.stat().st_size} bytes, expected at least ")
    with pytest.raises(CheckpointError, match=rf"{last.name}, tensor matrix: can't be read: .* ends"):
        found.tensors["matrix"].read(((0, 13), (0, 7)))
    last.unlink()
    assert TorchDist(written).problems() == [f"{last} is missing"]
    with pytest.raises(CheckpointError, match=rf"{last.name}, tensor matrix: No such file"):
        found.tensors["matrix"].read(((0, 13), (0, 7)))


@pytest.mark.parametrize("damage", [cut, lambda path: path.write_bytes(b"\0" * 50), lambda path: path.unlink()])
def test_a_damaged_metadata_is_named(written, damage):
    damage(written / ".metadata")
    with pytest.raises(CheckpointError, match=r"\.metadata: .*; expected the metadata of a torch_dist checkpoint"):
        TorchDist(written)


def test_a_part_that_nobody_wrote_is_missed(written):
    with (written / ".metadata").open("rb") as file:
        metadata = pickle.load(file)
    del metadata.state_dict_metadata["matrix"].chunks[1]
    (written / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"tensor matrix: \d+ of 91 values are nowhere"):
        TorchDist(written).tensors["matrix"].read(((0, 13), (0, 7)))


def test_a_chunk_of_another_shape_than_the_metadata_says(written):
    with (written / ".metadata").open("rb") as file:
        metadata = pickle.load(file)
    metadata.state_dict_metadata["vector"].properties.dtype = torch.int32
    (written / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"tensor vector: .*metadata has \[\d+\] in torch.int32, the file"):
        TorchDist(written).tensors["vector"].read(((0, 11),))


def test_nan_is_refused(tmp_path):
    writer = TorchDistWriter(tmp_path, lambda count: None)
    writer.add("bad", InMemory(torch.tensor([1.0, float("nan")]), []), torch.float32)
    writer.finish({})
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp: tensor bad has NaN in it"):
        TorchDist(tmp_path).tensors["bad"].read(((0, 2),))


def test_metadata_json_comes_last(tmp_path):
    writer = TorchDistWriter(tmp_path, lambda count: None)
    writer.add("a", InMemory(torch.ones(3), []), torch.float32)
    assert not (tmp_path / "metadata.json").exists()
    writer.finish({})
    assert json.loads((tmp_path / "metadata.json").read_text())["sharded_backend"] == "torch_dist"
