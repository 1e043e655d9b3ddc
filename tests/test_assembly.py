"""Parameters made of several HF tensors: together and apart again."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megasched.plan.param_mapping import ParamMapping
from megasched.plan.placement import Placement


def placements(*sizes, rest=()):
    return tuple(Placement(f"p{i}", (size, *rest), axis=0) for i, size in enumerate(sizes))


def assert_inverse_on_every_rank(assembly, size):
    """``join`` and ``split``, for tensors of random numbers."""
    whole = [torch.randn(part.shape) for part in assembly.parts]
    for rank in range(size):
        pieces = [part.shard(full, rank, size) for part, full in zip(assembly.parts, whole, strict=True)]
        local = assembly.join(pieces, size)
        assert tuple(local.shape) == assembly.local_shape(size)
        for got, want in zip(assembly.split(local, size), pieces, strict=True):
            assert torch.equal(got, want)


@given(
    groups=st.integers(1, 4),
    size=st.integers(1, 3),
    widths=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    rest=st.sampled_from([(), (2,)]),
)
def test_join_and_split_are_inverse_on_every_rank(groups, size, widths, rest):
    groups *= size
    parts = placements(*(groups * width for width in widths), rest=rest)
    assert_inverse_on_every_rank(ParamMapping(parts, groups), size)


@given(
    groups=st.integers(1, 3),
    size=st.integers(1, 3),
    heads=st.integers(1, 3),
    rows=st.integers(1, 3),
    rest=st.sampled_from([(), (2,)]),
)
def test_paired_rows_are_sorted_and_back_on_every_rank(groups, size, heads, rows, rest):
    groups *= size
    parts = placements(groups * heads * 2 * rows, groups * rows, rest=rest)
    assert_inverse_on_every_rank(ParamMapping(parts, groups, paired=rows), size)


def test_a_head_and_its_gate_come_apart_as_in_megatrons_gated_attention():
    """2 groups of 2 heads of one row: q0 g0 q1 g1 ... of HF are q0 q1 g0 g1 k0 | q2 q3 g2 g3 k1."""
    parts = placements(8, 2)
    q, k = torch.tensor([0, 100, 1, 101, 2, 102, 3, 103]), torch.tensor([10, 11])
    assembly = ParamMapping(parts, 2, paired=1)
    assert assembly.join([q, k], 1).tolist() == [0, 1, 100, 101, 10, 2, 3, 102, 103, 11]
    with pytest.raises(ValueError, match=r"p0: \[8\] is not made of pairs of 3 in 2 groups"):
        ParamMapping(parts, 2, paired=3)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rest", [(6, 4), (6,)])
def test_an_entry_is_rearranged_and_back(transposed, interleaved, rest):
    """Of 3 experts the second: [6, 4] in HF, or the bias of 6 features."""
    if transposed and len(rest) < 2:
        return
    part = Placement("experts", (3, *rest), axis=0)
    assembly = ParamMapping((part,), entry=1, transposed=transposed, interleaved=interleaved)
    whole = torch.arange(3 * torch.Size(rest).numel()).view(3, *rest)
    rank, size = assembly.cut(0, 1)
    local = assembly.join([part.shard(whole, rank, size)], size)
    assert tuple(local.shape) == assembly.local_shape(size)
    assert torch.equal(assembly.split(local, size)[0], whole[1:2])
    upright = whole[1].t() if transposed else whole[1]
    order = [*range(0, len(upright), 2), *range(1, len(upright), 2)] if interleaved else range(len(upright))
    assert torch.equal(local, upright[list(order)])


def test_only_an_entry_is_rearranged():
    with pytest.raises(ValueError, match="only an entry is rearranged"):
        ParamMapping(placements(4), interleaved=True)


def test_groups_take_turns_as_megatrons_qkv_does():
    """2 heads of k and v of one row each, 4 of q: q0 q1 k0 v0 | q2 q3 k1 v1."""
    parts = placements(4, 2, 2)
    q, k, v = torch.tensor([0, 1, 2, 3]), torch.tensor([10, 11]), torch.tensor([20, 21])
    assert ParamMapping(parts, 2).join([q, k, v], 1).tolist() == [0, 1, 10, 20, 2, 3, 11, 21]
    assert ParamMapping(parts, 2).join([q[2:], k[1:], v[1:]], 2).tolist() == [2, 3, 11, 21]
    assert ParamMapping(parts).join([q, k, v], 1).tolist() == [0, 1, 2, 3, 10, 11, 20, 21]


def test_components_of_a_packed_part_take_turns_too():
    packed = Placement("qkv", (8,), axis=0, components=(4, 2, 2))
    whole = torch.tensor([0, 1, 2, 3, 10, 11, 20, 21])
    assert ParamMapping((packed,), 2).join([whole], 1).tolist() == [0, 1, 10, 20, 2, 3, 11, 21]
    for rank, local in enumerate(([0, 1, 10, 20], [2, 3, 11, 21])):
        piece = packed.shard(whole, rank, 2)
        assert ParamMapping((packed,), 2).join([piece], 2).tolist() == local
        assert torch.equal(ParamMapping((packed,), 2).split(torch.tensor(local), 2)[0], piece)
    with pytest.raises(ValueError, match="is not made of 4 groups"):
        ParamMapping((packed,), 4)


def test_groups_that_do_not_divide():
    with pytest.raises(ValueError, match="p1: \\[3\\] is not made of 2 groups"):
        ParamMapping(placements(4, 3), 2)
    with pytest.raises(ValueError, match="2 groups do not divide by TP 4"):
        ParamMapping(placements(8, 4), 2).split(torch.zeros(3), 4)


def test_one_part_is_itself():
    whole = torch.randn(4)
    assert ParamMapping(placements(4)).join([whole], 1) is whole
    assert ParamMapping(placements(4)).split(whole, 1)[0] is whole


def test_a_parameter_without_dimensions_is_itself():
    assembly = ParamMapping((Placement("scale", ()),))
    scale = torch.tensor(2.0)
    assert assembly.local_shape(2) == ()
    assert assembly.join([scale], 2) is scale
    assert [piece.shape for piece in assembly.split(scale, 2)] == [()]
