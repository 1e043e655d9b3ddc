"""Safetensors written block by block are those of the library, in shards of the size that was asked for."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from megasched.weights.hf.safetensors_files import dtype_names
from megasched.weights.hf.writer import Output, write_weights
from megasched.weights.lazy import blocks
from tests.weights.test_traced_functions import InMemory


def outputs(tensors, dtype=None):
    return [Output(name, InMemory(value, []), dtype or value.dtype) for name, value in tensors.items()]


@settings(max_examples=100)
@given(
    shape=st.lists(st.integers(1, 7), max_size=4),
    itemsize=st.sampled_from([1, 2, 4, 8]),
    limit=st.integers(8, 200),
)
def test_blocks_cover_a_tensor_in_the_order_of_memory(shape, itemsize, limit):
    numbers = torch.arange(torch.Size(shape).numel()).view(shape)
    pieces = [numbers[tuple(slice(a, b) for a, b in box)] for box in blocks(shape, itemsize, limit)]
    assert torch.cat([piece.reshape(-1) for piece in pieces]).tolist() == list(range(numbers.numel()))
    assert all(piece.numel() * itemsize <= max(limit, itemsize) for piece in pieces)


def test_every_dtype_is_read_back(tmp_path):
    made = {str(dtype): torch.arange(6).view(2, 3).to(dtype) for dtype in dtype_names()}
    written = []
    write_weights(tmp_path, outputs(made), 10**9, written.append)
    found = load_file(tmp_path / "model.safetensors")
    assert found.keys() == made.keys()
    for name, value in made.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name].float(), value.float()), name
    assert sum(written) == sum(value.nbytes for value in made.values())
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


@pytest.mark.parametrize("limit", [100, 250, 10**6])
def test_shards_hold_at_most_what_was_asked_for(tmp_path, limit):
    made = {f"layer.{i}.weight": torch.randn(5, i + 1) for i in range(9)}
    write_weights(tmp_path, outputs(made), limit, lambda count: None)
    files = sorted(tmp_path.glob("*.safetensors"))
    together = {}
    for path in files:
        found = load_file(path)
        assert len(found) == 1 or sum(value.nbytes for value in found.values()) <= limit
        together |= found
    assert together.keys() == made.keys()
    assert all(torch.equal(together[name], made[name]) for name in made)
    if limit == 10**6:
        assert [path.name for path in files] == ["model.safetensors"]
        return
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in made.values())
    for name, file in index["weight_map"].items():
        assert name in load_file(tmp_path / file)
    assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"


def test_values_are_cast(tmp_path):
    made = {"a": torch.randn(40, 3)}
    write_weights(tmp_path, outputs(made, torch.bfloat16), 10**6, lambda count: None)
    assert torch.equal(load_file(tmp_path / "model.safetensors")["a"], made["a"].bfloat16())
