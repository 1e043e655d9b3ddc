"""Ids that are none of the vocabulary: of the data, found before the first step; of a batch, on every stage."""

from __future__ import annotations

import json

import numpy
import pytest
import torch

from megasched.errors import ConfigError
from megasched.layers.embedding import refuse_ids
from megasched.trainer import token_ids
from megasched.trainer.token_ids import check_data
from megasched.verify.ranks.pool import RankError
from megasched.verify.trainer_run import train
from tests import tiny

VOCABULARY = tiny.FAMILIES["llama"]["vocab_size"]


def data(folder, *documents, dtype="uint16"):
    """A data set of some documents, each a list of ids; its prefix."""
    lengths = numpy.array([len(ids) for ids in documents], "<i4")
    ends = numpy.cumsum([0, *lengths]).astype("<i8")
    code = {"uint16": 8, "int32": 4, "float32": 7}[dtype]
    head = b"MMIDIDX\0\0" + numpy.array([1], "<i8").tobytes() + bytes([code])
    head += numpy.array([len(lengths), len(lengths) + 1], "<i8").tobytes()
    pointers = ends[:-1] * numpy.dtype(dtype).itemsize
    order = numpy.arange(len(lengths) + 1, dtype="<i8")
    (folder / "text.idx").write_bytes(head + lengths.tobytes() + pointers.tobytes() + order.tobytes())
    numpy.concatenate([numpy.array(ids, dtype) for ids in documents]).tofile(folder / "text.bin")
    return str(folder / "text")


@pytest.mark.parametrize(
    ("ids", "dtype", "message"),
    [
        ([98, 99, 7], "uint16", "document 1 has the token id 99, and the model's vocabulary ends with 98"),
        ([1, 2, 70000], "int32", "document 1 has the token id 70000"),
        ([1, -5, 2], "int32", "document 1 has the token id -5"),
    ],
)
def test_data_of_another_tokenizer(tmp_path, ids, dtype, message):
    prefix = data(tmp_path, [0, 98], ids, [3], dtype=dtype)
    with pytest.raises(ConfigError) as caught:
        check_data(prefix, 99, None)
    assert str(caught.value).startswith(f"{prefix}.bin: {message}")
    check_data(data(tmp_path, [0, 98], [1.0], dtype="float32"), 2, None)


def test_data_are_read_once(tmp_path, monkeypatch):
    prefix, cache = data(tmp_path, [0, 98], [97]), tmp_path / "caches"
    check_data(prefix, 99, str(cache))
    (kept,) = cache.iterdir()
    found = json.loads(kept.read_text())
    assert (found["largest"], found["largest_at"], found["smallest"]) == (98, 2, 0)
    kept.write_text(json.dumps({**found, "largest": 120}))
    with pytest.raises(ConfigError, match="token id 120"):
        check_data(prefix, 99, str(cache))
    kept.write_bytes(b"\xff")
    check_data(prefix, 99, str(cache))
    assert json.loads(kept.read_text()) == found
    data(tmp_path, [0, 98], [97, 96])
    check_data(prefix, 99, str(cache))
    assert json.loads(kept.read_text())["size"] == 8
    (tmp_path / "file").write_text("")
    check_data(prefix, 99, str(tmp_path / "file"))  # where nothing can be kept


def test_data_sets_of_one_name_in_several_folders_are_kept_apart(tmp_path, monkeypatch):
    cache, read, real = str(tmp_path / "caches"), [], token_ids._range
    monkeypatch.setattr(token_ids, "_range", lambda path, *more: read.append(path) or real(path, *more))
    prefixes = []
    for name in ("books", "web"):
        (tmp_path / name).mkdir()
        prefixes.append(data(tmp_path / name, [0, 98], [97]))
    monkeypatch.chdir(tmp_path)
    for prefix in (*prefixes, *prefixes, "web/text"):
        check_data(prefix, 99, cache)
    assert [str(path) for path in read] == [f"{prefix}.bin" for prefix in prefixes]


def test_of_much_data_a_sample_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(token_ids, "BLOCK", 8)
    monkeypatch.setattr(token_ids, "BLOCKS", 3)
    prefix = data(tmp_path, [0] * 4, [500] * 4, [0] * 4, [0] * 4, [98] * 2)
    check_data(prefix, 99, None)
    with pytest.raises(ConfigError, match="document 4 has the token id 98"):
        check_data(prefix, 98, str(tmp_path / "other"))


def test_ids_of_a_batch():
    ids = torch.tensor([[0, 98], [3, 5]])
    refuse_ids("input_ids", ids, 99, below_zero=True)
    refuse_ids("labels", torch.tensor([[-100]]), 99, below_zero=False)
    refuse_ids("input_ids", ids.to("meta"), 9, below_zero=True)
    with pytest.raises(ConfigError, match=r"an id is none of the vocabulary, which ends with 97; 98 at \[0, 1\]"):
        refuse_ids("input_ids", ids, 98, below_zero=True)


@pytest.mark.parametrize("flags", [["--tensor-model-parallel-size", "2"], ["--pipeline-model-parallel-size", "2"]])
def test_a_batch_with_an_id_of_the_padding_ends_the_run(ranks, tmp_path, flags):
    model = tiny.save("llama", tmp_path)
    with pytest.raises(RankError, match=rf"an id is none of the vocabulary, which ends with {VOCABULARY - 1}"):
        ranks.run(2, train, model, flags, iterations=1, tokens=(VOCABULARY, VOCABULARY + 1))


def test_a_run_looks_at_its_data_before_the_first_step(ranks, tmp_path):
    model = tiny.save("llama", tmp_path / "model")
    prefix = data(tmp_path, *([1, 2, 3, 4] * 8 for _ in range(20)), [VOCABULARY] * 4, [5] * 40)
    flags = ["--tensor-model-parallel-size", "2", "--data-path", prefix, "--data-cache-path", str(tmp_path / "c")]
    with pytest.raises(RankError, match=rf"text\.bin: document 20 has the token id {VOCABULARY}") as caught:
        ranks.run(2, train, model, [*flags, "--split", "1,0,0"], iterations=1, mock_data=False)
    assert " iteration        1/" not in str(caught.value)
    (tmp_path / "text.idx").write_bytes((tmp_path / "text.idx").read_bytes()[:-8])
    with pytest.raises(RankError, match=r"text\.idx: 22 sequences and 23 ends of documents take \d+ bytes"):
        ranks.run(2, train, model, [*flags, "--split", "1,0,0"], iterations=1, mock_data=False)
