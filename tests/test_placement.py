"""Properties of Placement: what ranks hold, together, is the parameter."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megasched.plan.placement import Placement

SIZES = st.sampled_from([1, 2, 3, 4, 6, 8])


def numbered(shape):
    """A tensor whose every element differs, none of them zero."""
    return torch.arange(1, torch.Size(shape).numel() + 1).reshape(shape)


@st.composite
def cut(draw, kinds=("plain", "packed", "padded")):
    """(placement that is cut, TP size): plain, packed or padded, along any axis, upright or transposed."""
    size = draw(SIZES)
    rank_count = draw(st.integers(1, 3))
    shape = draw(st.lists(st.integers(1, 5), min_size=rank_count, max_size=rank_count))
    axis = draw(st.integers(0, rank_count - 1))
    components, padded = (), None
    kind = draw(st.sampled_from(kinds))
    if kind == "plain":
        shape[axis] = size * draw(st.integers(1, 4))
    elif kind == "packed":
        components = tuple(size * draw(st.integers(1, 3)) for _ in range(draw(st.integers(1, 4))))
        shape[axis] = sum(components)
    else:
        shape[axis] = draw(st.integers(1, 12))
        padded = size * draw(st.integers(-(-shape[axis] // size), 16))
    transposed = rank_count == 2 and draw(st.booleans())
    return Placement("p", tuple(shape), axis, components, padded, transposed), size


@st.composite
def whole(draw):
    """(placement that every rank holds in full, TP size)."""
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=0, max_size=3)))
    return Placement("p", shape, transposed=len(shape) == 2 and draw(st.booleans())), draw(SIZES)


EITHER = st.one_of(cut(), whole())


@given(EITHER)
def test_unshard_is_the_inverse_of_shard(case):
    placement, size = case
    full = numbered(placement.shape)
    assert torch.equal(placement.unshard([placement.shard(full, rank, size) for rank in range(size)]), full)


@given(EITHER)
def test_every_rank_holds_local_shape(case):
    placement, size = case
    full = numbered(placement.shape)
    for rank in range(size):
        assert tuple(placement.shard(full, rank, size).shape) == placement.local_shape(size)


@given(cut())
def test_ranges_are_disjoint_complete_and_one_for_each_component(case):
    placement, size = case
    limit = placement.shape[placement.axis]
    seen = [0] * limit
    for rank in range(size):
        ranges = placement.ranges(rank, size)
        assert len(ranges) == max(1, len(placement.components))
        for start, stop in ranges:
            assert 0 <= start <= stop <= limit
            for index in range(start, stop):
                seen[index] += 1
    assert seen == [1] * limit


@given(cut())
def test_ranks_hold_the_rows_that_ranges_name_then_zeros(case):
    placement, size = case
    full = numbered(placement.shape)
    for rank in range(size):
        held = placement.shard(full, rank, size)
        upright = held.t() if placement.transposed else held
        rows = [index for start, stop in placement.ranges(rank, size) for index in range(start, stop)]
        axis = placement.axis
        assert torch.equal(upright.narrow(axis, 0, len(rows)), full.index_select(axis, torch.tensor(rows).long()))
        assert torch.count_nonzero(upright.narrow(axis, len(rows), upright.shape[axis] - len(rows))) == 0


@given(cut())
def test_assemble_of_the_named_pieces_is_shard(case):
    placement, size = case
    full = numbered(placement.shape)
    for rank in range(size):
        pieces = [full.narrow(placement.axis, a, b - a) for a, b in placement.ranges(rank, size)]
        assert torch.equal(placement.assemble(pieces, size), placement.shard(full, rank, size))


@given(cut(kinds=["packed"]))
def test_components_stay_side_by_side_on_every_rank(case):
    placement, size = case
    full = numbered(placement.shape)
    apart = full.split(placement.components, dim=placement.axis)
    for rank in range(size):
        own = [part.chunk(size, dim=placement.axis)[rank] for part in apart]
        want = torch.cat(own, dim=placement.axis)
        assert torch.equal(placement.shard(full, rank, size), want.t() if placement.transposed else want)


def test_a_packed_projection_by_hand():
    placement = Placement("qkv", (8, 1), axis=0, components=(4, 2, 2))
    full = torch.tensor([[10], [11], [12], [13], [20], [21], [30], [31]])
    assert placement.shard(full, 0, 2).flatten().tolist() == [10, 11, 20, 30]
    assert placement.shard(full, 1, 2).flatten().tolist() == [12, 13, 21, 31]
    assert placement.ranges(1, 2) == [(2, 4), (5, 6), (7, 8)]


def test_a_padded_vocabulary_by_hand():
    placement = Placement("embed", (5, 1), axis=0, padded=12)
    full = torch.tensor([[1], [2], [3], [4], [5]])
    held = [placement.shard(full, rank, 3).flatten().tolist() for rank in range(3)]
    assert held == [[1, 2, 3, 4], [5, 0, 0, 0], [0, 0, 0, 0]]
    assert placement.ranges(2, 3) == [(5, 5)]
    assert placement.unshard([torch.tensor(rows)[:, None] for rows in held]).flatten().tolist() == [
        1,
        2,
        3,
        4,
        5,
    ]


def test_a_transposed_piece_by_hand():
    placement = Placement("c_fc", (2, 4), axis=1, transposed=True)
    full = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
    assert placement.shard(full, 1, 2).tolist() == [[3, 7], [4, 8]]
    assert placement.local_shape(2) == (2, 2)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"axis": 2}, "no axis 2 in shape"),
        ({"axis": -1}, "no axis -1 in shape"),
        ({"axis": 0, "components": (4, 3)}, "do not add up"),
        ({"components": (4, 4)}, "do not add up"),
        ({"axis": 0, "padded": 7}, "padded size 7 is below"),
        ({"padded": 16}, "padded size 16 is below"),
        ({"axis": 0, "components": (4, 4), "padded": 16}, "can't be padded"),
    ],
)
def test_what_can_not_be_is_refused(fields, message):
    with pytest.raises(ValueError, match=f"^weight: .*{message}"):
        Placement("weight", (8, 4), **fields)


@pytest.mark.parametrize("fields", [{}, {"components": (5, 3)}, {"padded": 10}])
def test_a_size_that_does_not_divide_is_refused(fields):
    placement = Placement("weight", (8, 4), axis=0, **fields)
    with pytest.raises(ValueError, match=r"^weight: \d+ along axis 0 does not divide by TP 3"):
        placement.ranges(0, 3)
    with pytest.raises(ValueError, match=r"^weight: \d+ along axis 0 does not divide by TP 3"):
        placement.local_shape(3)


def test_a_packed_size_that_divides_only_in_sum_is_refused():
    placement = Placement("weight", (8, 4), axis=0, components=(5, 3))
    with pytest.raises(ValueError, match="5 along axis 0 does not divide by TP 2"):
        placement.shard(numbered((8, 4)), 0, 2)


def test_a_tensor_of_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"^weight: got shape \[4, 8\], expected \[8, 4\]"):
        Placement("weight", (8, 4), axis=0).shard(numbered((4, 8)), 0, 2)


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_outside_the_group_is_refused(rank):
    with pytest.raises(ValueError, match=f"^weight: no rank {rank} in TP 2"):
        Placement("weight", (8, 4), axis=0).ranges(rank, 2)


def test_transposing_what_has_no_two_axes_is_refused():
    with pytest.raises(ValueError, match=r"^bias: only a matrix can be transposed"):
        Placement("bias", (2, 3, 4), transposed=True)
