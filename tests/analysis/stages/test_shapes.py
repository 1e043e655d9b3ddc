"""Shapes that follow the batch and the sequence."""

import pytest
import torch

from megasched.analysis.stages.shapes import SIZES, FollowsNeither, Shape, shape_of


@pytest.mark.parametrize(
    ("size", "word"),
    [
        (lambda b, s: 8, 8),
        (lambda b, s: b, "b"),
        (lambda b, s: s, "s"),
        (lambda b, s: b * s, "b*s"),
        (lambda b, s: 3 * s, "3*s+0"),
        (lambda b, s: s + 32, "1*s+32"),
    ],
)
def test_a_dimension_is_known_by_two_sizes(size, word):
    shape = shape_of(*(torch.empty(size(b, s), 4) for b, s in SIZES))
    assert shape == Shape((word, 4), torch.float32)
    assert shape.sizes(3, 16) == (size(3, 16), 4)


def test_a_dimension_that_follows_neither():
    with pytest.raises(FollowsNeither) as raised:
        shape_of(torch.empty(9), torch.empty(10))
    assert raised.value.args == (9, 10)


def test_what_stays_in_float32():
    one, two, half = torch.empty(2), torch.empty(2), torch.empty(2, dtype=torch.bfloat16)
    assert shape_of(one, half, second_dtype=torch.bfloat16).run_dtype(torch.bfloat16) == torch.bfloat16
    assert shape_of(one, two, second_dtype=torch.bfloat16).run_dtype(torch.bfloat16) == torch.float32
    assert shape_of(one, two).run_dtype(torch.bfloat16) == torch.bfloat16
    assert Shape((2,), torch.int64).run_dtype(torch.bfloat16) == torch.int64
