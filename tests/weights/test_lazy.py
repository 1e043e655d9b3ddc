"""What is refused for NaN: that alone."""

import pytest
import torch

from megasched.errors import CheckpointError
from megasched.weights.lazy import refuse_nan

INFINITY = float("inf")
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 3, 5000])
@pytest.mark.parametrize("place", [0, -1])
def test_a_nan_is_found_wherever_it_is(dtype, count, place):
    values = torch.linspace(-1, 1, count).to(dtype)
    refuse_nan(values, "x")
    values[place] = float("nan")
    with pytest.raises(CheckpointError, match="file 7: tensor x has NaN in it"):
        refuse_nan(values, "file 7: tensor x")


@pytest.mark.parametrize("dtype", DTYPES)
def test_infinities_and_sums_out_of_range_are_no_nan(dtype):
    large = torch.finfo(dtype).max
    for values in ([INFINITY, -INFINITY], [large] * 9 + [-large] * 9, [-INFINITY, large], []):
        refuse_nan(torch.tensor(values, dtype=dtype), "x")


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float8_e4m3fn])
def test_what_has_none(dtype):
    refuse_nan(torch.zeros(4).to(dtype), "x")
