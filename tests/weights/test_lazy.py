"""What is refused for NaN: that alone; and memory that goes back when it is freed."""

import psutil
import pytest
import torch

from megasched.errors import CheckpointError
from megasched.weights.lazy import OWN_PAGES, Computed, Tied, refuse_nan, zeros
from megasched.weights.universal import is_universal

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


@pytest.mark.parametrize("dtype", [*DTYPES, torch.int64, torch.uint8, torch.float8_e4m3fn])
@pytest.mark.parametrize("shape", [(), (0, 3), (5, 7), (OWN_PAGES // 8 + 1, 8), (2, OWN_PAGES, 3)])
def test_zeros_of_every_size_can_be_written(shape, dtype):
    values = zeros(shape, dtype)
    assert tuple(values.shape) == shape
    assert values.dtype == dtype
    assert values.is_contiguous()
    assert not values.float().any()
    values.copy_(torch.ones(shape).to(dtype))
    assert values.float().sum() == values.numel()


def test_large_ones_go_back_to_the_system_whatever_lies_behind_them():
    process, size = psutil.Process(), 48 << 20
    pieces = [zeros((16 << 20,), torch.uint8).fill_(1) for _ in range(3)]
    behind = torch.ones(1000)
    full = process.memory_info().rss
    del pieces
    assert full - process.memory_info().rss > 0.9 * size
    assert behind.sum() == 1000


def test_the_sum_of_what_is_not_contiguous_is_not_taken(monkeypatch):
    """torch copies such bfloat16 to float32 first: twice its size, which the heap then keeps."""
    values = torch.ones(64, 64, dtype=torch.bfloat16)
    monkeypatch.setattr(torch.Tensor, "sum", lambda self: pytest.fail("the sum was taken"))
    refuse_nan(values[:, :32], "x")
    values[3, 5] = float("nan")
    with pytest.raises(CheckpointError, match="x has NaN in it"):
        refuse_nan(values[:, :32], "x")


def test_a_tensor_that_is_stored_twice_has_equal_values_in_both():
    """Of what is read of it: a rank reads its part alone."""
    first, other = torch.arange(6.0).view(2, 3), torch.arange(6.0).view(2, 3)
    other[1, 2] = 7

    def tied(values):
        return Tied((Computed((), lambda: first, (2, 3)), Computed((), lambda: values, tuple(values.shape))))

    assert torch.equal(tied(first.clone()).read(((0, 2), (0, 3))), first)
    assert torch.equal(tied(other).read(((0, 1), (0, 3))), first[:1])
    for values, box in ((other, ((1, 2), (0, 3))), (torch.arange(8.0).view(2, 4), ((0, 2), (0, 3)))):
        with pytest.raises(CheckpointError, match="are one parameter of the definition but differ"):
            tied(values).read(box)


def test_a_universal_checkpoint_has_no_metadata_of_megatrons(tmp_path):
    assert not is_universal(tmp_path)
    (tmp_path / "zero").mkdir()
    assert is_universal(tmp_path)
    (tmp_path / "metadata.json").touch()
    assert not is_universal(tmp_path)
