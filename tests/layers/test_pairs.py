"""Pairs of a token and one of its experts: sorted, spread from tokens and collected to them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megasched.layers.fused.pairs import by_expert, in_order


@st.composite
def routings(draw):
    """Experts [t, k] of few tokens, some of them beyond all experts."""
    experts = draw(st.sampled_from([1, 3, 255, 256, 40_000]))
    tokens, choices = draw(st.integers(1, 6)), draw(st.integers(1, 3))
    numbers = st.integers(0, experts + 2) if experts < 10 else st.sampled_from([0, 1, experts - 1, experts, 2**40])
    flat = draw(st.lists(numbers, min_size=tokens * choices, max_size=tokens * choices))
    return torch.tensor(flat).view(tokens, choices), experts


@given(routings())
@settings(max_examples=200, deadline=None)
def test_pairs_are_sorted_as_by_their_numbers(routing):
    index, experts = routing
    chosen, order = by_expert(index, experts)
    clamped = index.flatten().clamp(max=experts)
    expected = clamped.sort(stable=True)
    assert chosen.long().tolist() == expected.values.tolist()
    assert order.tolist() == expected.indices.tolist()


@pytest.mark.parametrize(("experts", "dtype"), [(255, torch.uint8), (256, torch.int16), (40_000, torch.int32)])
def test_keys_are_as_small_as_they_can_be(experts, dtype):
    assert by_expert(torch.tensor([[experts]]), experts)[0].dtype == dtype


@given(routings())
@settings(max_examples=100, deadline=None)
def test_spreading_and_collecting_are_what_indexing_does(routing):
    index, experts = routing
    tokens, choices = index.shape
    order = by_expert(index, experts)[1]
    count = int((index < experts).sum())
    pairs = in_order(order, index, count)

    hidden = torch.randn(tokens, 4, dtype=torch.float64, requires_grad=True)
    spread = pairs.spread(hidden)
    expected = hidden[order[:count] // choices]
    assert torch.equal(spread, expected)
    weights = torch.randn_like(spread)
    (gradient,) = torch.autograd.grad((spread * weights).sum(), hidden)
    (right,) = torch.autograd.grad((expected * weights).sum(), hidden)
    torch.testing.assert_close(gradient, right)

    results = torch.randn(count, 4, dtype=torch.float64, requires_grad=True)
    whole = results.new_zeros(tokens * choices, 4).index_copy(0, order[:count], results)
    summed = whole.view(tokens, choices, 4).sum(dim=1)
    collected = pairs.collect(results)
    torch.testing.assert_close(collected, summed)
    weights = torch.randn_like(summed)
    (gradient,) = torch.autograd.grad((collected * weights).sum(), results)
    (right,) = torch.autograd.grad((summed * weights).sum(), results)
    assert torch.equal(gradient, right)
