"""How parts of ranks match a tensor, and how wrong ones relate to it."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from megasched.plan.placement import Placement
from megasched.verify.locate.matching import match, relation

torch.manual_seed(0)
X = torch.randn(2, 6, 8)


@given(
    size=st.sampled_from([2, 4]),
    dim=st.integers(0, 2),
    lengths=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    seed=st.integers(0, 99),
)
def test_what_a_placement_cuts_is_matched_as_cut_there(size, dim, lengths, seed):
    sizes = [length * size for length in lengths] if dim == 2 else [size * lengths[0]]
    shape = [3, 5, 7]
    shape[dim] = sum(sizes)
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    placement = Placement("x", tuple(shape), axis=dim, components=tuple(sizes))
    parts = [placement.shard(whole, rank, size) for rank in range(size)]
    found = match(parts, whole, components=sizes if dim == 2 else ())
    assert (found.way, found.dim, found.error) == ("cut", dim, 0.0)
    parts[0] = parts[0] + 1
    assert match(parts, whole, components=sizes if dim == 2 else ()).error > 0.1


def test_the_errors_of_whole_tensors_are_those_of_each_rank():
    found = match([X, X + 0.5 * X.abs().max()], X)
    assert found.way == "whole"
    assert found.errors == pytest.approx((0.0, 0.5))


def test_a_rank_without_numbers_matches_in_no_way():
    assert match([X, X.masked_fill(X > 1, torch.nan)], X).error == torch.inf
    assert match([X[:, :3], X[:, 3:].masked_fill(X[:, 3:] > 1, torch.nan)], X).error == torch.inf


def test_parts_of_a_sum_count_only_where_they_may():
    parts = [0.25 * X, 0.75 * X]
    assert match(parts, X, sums=True).way == "summed"
    assert match(parts, X, sums=True).error < 1e-6
    assert match(parts, X).error == pytest.approx(0.75)


def test_shapes_that_fit_in_no_way_match_nothing():
    assert match([X[:, :5]], X) is None
    assert match([X[..., :3], X[..., 3:]], X) is None


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ([0.3 * X, 0.7 * X], "each TP rank has a part"),
        ([X + torch.arange(8.0)] * 2, "off by the same vector at every token"),
        ([1.7 * X] * 2, "1.7 times"),
        ([X.bfloat16().float()] * 2, "rounded to bfloat16"),
        ([X, X.roll(1, 0) * 2], "different values where all must have the same"),
        ([X.roll(4, 2)], "the right blocks of 4 along dimension 2"),
        ([X[..., 4:], X[..., :4]], "the right blocks of 4 along dimension 2"),
        ([torch.randn(2, 6, 8)], ""),
    ],
)
def test_a_simple_relation_is_told(parts, words):
    assert words in relation(parts, X)
    assert bool(relation(parts, X)) == bool(words)
