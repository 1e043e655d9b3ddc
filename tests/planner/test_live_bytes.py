"""Live bytes: storages counted once, from their making to their end."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from megasched.planner.measure.live_bytes import LiveBytes


def test_a_storage_counts_once_and_until_it_dies():
    with LiveBytes() as live:
        x = torch.zeros(10, 10)
        view = x.t()[2:]
        assert live.now == 400
        del x
        assert live.now == 400  # the view holds it
        del view
        assert (live.now, live.peak) == (0, 400)


def test_what_autograd_keeps_is_alive_until_the_backward():
    with LiveBytes() as live:
        x = torch.ones(100, requires_grad=True)
        y = (x * 2).exp().sum()  # exp keeps its result; the product dies
        assert live.now == 400 + 400 + 4
        live.reset_peak()
        y.backward()
        del y
        assert live.now == 400 + 400  # x and its gradient
        assert live.peak >= 400 + 400 + 4 + 400


@given(st.lists(st.integers(1, 50), min_size=1, max_size=8))
def test_the_peak_is_the_most_that_was_there(sizes):
    with LiveBytes() as live:
        held = [torch.zeros(size) for size in sizes]
        held.clear()
        assert (live.now, live.peak) == (0, 4 * sum(sizes))
        live.reset_peak()
        for size in sizes:
            torch.zeros(size)
        assert live.peak == 4 * max(sizes)


def test_fake_tensors_count_as_real_ones():
    with FakeTensorMode(), LiveBytes() as live:
        x = torch.zeros(1 << 40, dtype=torch.bfloat16)
        assert live.now == 2 << 40
        del x
        assert live.now == 0


def test_meta_tensors_do_not_count():
    with LiveBytes() as live:
        torch.zeros(10, device="meta")
    assert live.peak == 0
