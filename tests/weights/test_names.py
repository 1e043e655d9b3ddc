import pytest
import torch

from megasched.errors import CheckpointError
from megasched.weights.source import canonical_names, compare_names


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(2, 3, bias=False)
        self.body = torch.nn.Linear(2, 2)
        self.embed = torch.nn.Embedding(3, 2)
        self.embed.weight = self.head.weight


def test_a_tie_goes_by_its_first_name():
    assert canonical_names(Tied()) == {
        "head.weight": "head.weight",
        "body.weight": "body.weight",
        "body.bias": "body.bias",
        "embed.weight": "head.weight",
    }


def test_canonical_names_are_those_of_named_parameters(definition):
    names = list(dict.fromkeys(canonical_names(definition).values()))
    assert names == [name for name, _ in definition.named_parameters()]


def test_compare_names_lists_both_sides_in_one_message():
    with pytest.raises(CheckpointError) as caught:
        compare_names("the weights in /models/x", {"b", "a"}, ["z"])
    text = str(caught.value)
    assert text.startswith("the weights in /models/x do not fit")
    assert "missing (2):\n    a\n    b\n" in text
    assert "unexpected (1):\n    z\n" in text


def test_compare_names_is_silent_when_all_fit():
    compare_names("anything", set(), [])
