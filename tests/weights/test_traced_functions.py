"""What is noted of a function gives, box by box, what the function gives of whole tensors."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megasched.errors import CheckpointError
from megasched.weights.lazy import Computed, whole
from megasched.weights.traced_functions import noted


@dataclass(frozen=True)
class InMemory:
    """A lazy tensor of a real one, which keeps count of what is read."""

    value: torch.Tensor
    read_boxes: list

    @property
    def shape(self):
        return tuple(self.value.shape)

    @property
    def dtype(self):
        return self.value.dtype

    where = key = "memory"

    def read(self, box):
        self.read_boxes.append(box)
        return self.value[tuple(slice(start, stop) for start, stop in box)]

    def leaves(self):
        yield self


def stored(*shape):
    return InMemory(torch.randn(shape), [])


def values(tensors):
    return {name: tensor.value for name, tensor in tensors.items()}


# Each takes tensors a, b, c of one shape [4, 6].
FUNCTIONS = {
    "stack": lambda t: {"x": torch.stack([t["a"], t["b"], t["c"]], dim=0)},
    "stack in the middle": lambda t: {"x": torch.stack([t["a"], t["b"]], dim=1)},
    "cat": lambda t: {"x": torch.cat([t["a"], t["b"], t["c"]], dim=1)},
    "cat of stacks": lambda t: {
        "x": torch.cat([torch.stack([t["a"], t["b"]]), torch.stack([t["c"], t["a"]])], dim=-1)
    },
    "chunks": lambda t: dict(zip("xyz", torch.chunk(t["a"], 3, dim=-1), strict=True)),
    "uneven chunks": lambda t: dict(zip("xyz", torch.chunk(t["a"], 3, dim=0), strict=False)),
    "split": lambda t: dict(zip("xy", torch.split(t["a"], [1, 3], dim=0), strict=True)),
    "one by one": lambda t: {
        f"x{i}": part.squeeze(0).contiguous() for i, part in enumerate(torch.stack([t["a"], t["b"]]).chunk(2))
    },
    "transposed": lambda t: {"x": torch.cat([t["a"], t["b"]]).transpose(0, 1).contiguous()},
    "as it is": lambda t: {"x": t["b"]},
}


@settings(max_examples=40)
@given(data=st.data(), name=st.sampled_from(sorted(FUNCTIONS)))
def test_box_by_box_as_of_whole_tensors(data, name):
    function = FUNCTIONS[name]
    tensors = {key: stored(4, 6) for key in "abc"}
    expected = function(values(tensors))
    found = noted(function, tensors)
    assert found.keys() == expected.keys()
    for key, tensor in found.items():
        assert not isinstance(tensor, Computed)
        assert tensor.shape == tuple(expected[key].shape)
        assert tensor.dtype == torch.float32
        box = []
        for length in tensor.shape:
            start = data.draw(st.integers(0, length))
            box.append((start, data.draw(st.integers(start, length))))
        cut = tuple(slice(start, stop) for start, stop in box)
        assert torch.equal(tensor.read(tuple(box)), expected[key][cut])


def test_only_the_parts_in_the_box_are_read():
    tensors = {key: stored(4, 6) for key in "abc"}
    stack = noted(FUNCTIONS["stack"], tensors)["x"]
    stack.read(((1, 2), (0, 3), (2, 4)))
    assert [tensors[key].read_boxes for key in "abc"] == [[], [((0, 3), (2, 4))], []]


def test_what_has_no_boxes_is_computed_of_whole_tensors():
    def function(tensors):
        return {"x": tensors["a"].reshape(2, 2, 6).transpose(0, 1).reshape(4, 6), "y": tensors["b"]}

    tensors = {key: stored(4, 6) for key in "ab"}
    found = noted(function, tensors)
    assert isinstance(found["x"], Computed)
    assert found["x"].shape == (4, 6)
    expected = function(values(tensors))
    assert torch.equal(found["x"].read(((1, 3), (0, 6))), expected["x"][1:3])
    assert torch.equal(found["y"].read(whole((4, 6))), expected["y"])


def test_tensors_that_do_not_fit_are_named():
    tensors = {"a": stored(4, 6), "b": stored(4, 6), "c": stored(4, 5)}
    with pytest.raises(CheckpointError, match=r"memory has shape \[4, 5\]; memory has \[4, 6\]: .*one parameter"):
        noted(FUNCTIONS["stack"], tensors)
