"""The cut dimension followed through views, against arithmetic on the elements themselves."""

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megasched.analysis.rules.follow import follow
from megasched.analysis.rules.op_call import NeedsWhole, NoRule
from megasched.language.tensor_types import ON_ALL_RANKS, ShardDim

sizes = st.lists(st.integers(1, 4), min_size=1, max_size=4)


def moved(make, shape, along, dtype=torch.float32):
    """What ``follow`` says of the last operation that ``make`` does on a tensor of this shape."""
    from torch.utils._python_dispatch import TorchDispatchMode

    found = []
    known = {}

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            output = func(*args, **(kwargs or {}))
            outputs = [output] if isinstance(output, torch.Tensor) else list(output)
            places = follow(func, args, kwargs or {}, outputs, lambda t: known.get(id(t)))
            for tensor, place in zip(outputs, places, strict=True):
                if place is not None:
                    known[id(tensor)] = place
                kept.append(tensor)
            found[:] = places
            return output

    kept = []
    with torch.no_grad():
        x = torch.zeros(shape, device="meta", dtype=dtype)
        known[id(x)] = along
        with Watch():
            make(x)
    return found


def owners(shape, along, parts=2):
    """Which of two ranks holds each element."""
    size = shape[along.dim]
    inner = size // along.outer
    positions = torch.arange(size) % inner // (inner // parts)
    return positions.reshape([-1 if d == along.dim else 1 for d in range(len(shape))]).expand(shape)


@settings(max_examples=200)
@given(before=sizes, dim=st.integers(0, 3), factor=st.integers(1, 3), split=st.data())
def test_views(before, dim, factor, split):
    """Any view of a tensor cut in two: where it says that the cut is, it is."""
    dim %= len(before)
    before[dim] = 2 * factor
    total = torch.zeros(before).numel()
    after = []
    while total > 1:
        piece = split.draw(st.sampled_from([n for n in range(2, total + 1) if total % n == 0]))
        after.append(piece)
        total //= piece
    for _ in range(split.draw(st.integers(0, 2))):
        after.insert(split.draw(st.integers(0, len(after))), 1)
    try:
        (place,) = moved(lambda x: x.view(after), before, ShardDim(dim))
    except NeedsWhole:
        return
    assume((after[place.dim] // place.outer) % 2 == 0)  # else the view splits what a rank holds
    held = owners(before, ShardDim(dim)).contiguous().view(after)
    assert torch.equal(held, owners(after, place))


@given(order=st.permutations(range(4)), dim=st.integers(0, 3))
def test_permutations_and_transposes(order, dim):
    shape = [2, 3, 4, 5]
    (place,) = moved(lambda x: x.permute(order), shape, ShardDim(dim))
    assert shape[dim] == [shape[d] for d in order][place.dim]
    one, two = order[:2]
    (place,) = moved(lambda x: x.transpose(one, two), shape, ShardDim(dim))
    assert place.dim == {one: two, two: one}.get(dim, dim)


X = ShardDim(2)


def ids(*shape):
    return torch.zeros(shape, dtype=torch.long, device="meta")


@pytest.mark.parametrize(
    ("make", "place"),
    [
        (lambda x: x.unsqueeze(0), ShardDim(3)),
        (lambda x: x.unsqueeze(-1), ShardDim(2)),
        (lambda x: x[:, :, None].squeeze(2), ShardDim(2)),
        (lambda x: x[:1].squeeze(0), ShardDim(1)),
        (lambda x: x[0], ShardDim(1)),
        (lambda x: x[:, [1]], ShardDim(2)),
        (lambda x: x[torch.zeros(2, 2, dtype=torch.long, device="meta")], ShardDim(3)),
        (lambda x: x[ids(2), ids(2)], ShardDim(1)),
        (lambda x: x[ids(3, 1), ids(2)], ShardDim(2)),
        (lambda x: x.transpose(1, 2)[ids(2), :, ids(2)], ShardDim(1)),  # what indices give comes first
        (lambda x: x.gather(1, x.argmax(1, keepdim=True)), ShardDim(2)),
        (lambda x: x.gather(1, ids(2, 1, 1).expand(2, 1, 8)), ShardDim(2)),
        (lambda x: x.scatter(1, x.argmax(1, keepdim=True), 1.0), ShardDim(2)),
        (lambda x: x.scatter_add(1, ids(2, 3, 1).expand(2, 3, 8), x), ShardDim(2)),
        (lambda x: x.index_add(1, ids(3), x), ShardDim(2)),
        (
            lambda x: x.transpose(0, 2) @ torch.zeros(8, 2, 5, device="meta").new_zeros(1, 2, 5).expand(8, 2, 5),
            ShardDim(0),
        ),
        (lambda x: x.unflatten(2, (4, 2))[..., [-1]], ShardDim(2)),
        (lambda x: x[:, 1], ShardDim(1)),
        (lambda x: x[:, 1:], ShardDim(2)),
        (lambda x: x.expand(4, 2, 3, 8), ShardDim(3)),
        (lambda x: x.sum(1), ShardDim(1)),
        (lambda x: x.mean(1, keepdim=True), ShardDim(2)),
        (lambda x: x.max(0), ShardDim(1)),
        (lambda x: x.softmax(1), ShardDim(2)),
        (lambda x: torch.zeros(5, 2, 1, 1, device="meta") + x, ShardDim(3)),
        (lambda x: torch.cat([x, x], 1), ShardDim(2)),
        (lambda x: torch.cat([x[:, :0], x[:, :0]], 1), ShardDim(2)),  # a rotary part of width 0
        (lambda x: torch.stack([x, x], 1), ShardDim(3)),
        (lambda x: torch.zeros(2, 4, 3, device="meta") @ x, ShardDim(2)),
        (lambda x: torch.nn.functional.layer_norm(x.transpose(1, 2), (3,)), ShardDim(1)),
        (lambda x: x.reshape(2, 3, 2, 4).transpose(2, 3).reshape(2, 3, 8), ShardDim(2, outer=4)),
        (lambda x: x.transpose(1, 2).reshape(16, 3), ShardDim(0, outer=2)),
        (lambda x: x.transpose(1, 2).reshape(16, 3).view(2, 8, 3), ShardDim(1)),
        (lambda x: x.clone(), ShardDim(2)),
        (lambda x: x[:, [2, 0, 1]], ShardDim(2)),
        (lambda x: torch.rand_like(x), ShardDim(2)),
        (lambda x: torch.zeros(9, device="meta").index_select(0, x.argsort(1)[0, 0]), ShardDim(0)),
    ],
)
def test_followed(make, place):
    assert moved(make, (2, 3, 8), X)[0] == place


def test_a_mask_takes_the_place_of_the_dimensions_that_it_is_of():
    x, mask, out = torch.zeros(2, 3, 8), torch.ones(2, 3, dtype=torch.bool), torch.zeros(6, 8)
    index = torch.ops.aten.index.Tensor
    assert follow(index, (x, [mask]), {}, [out], lambda tensor: X if tensor is x else None) == [ShardDim(1)]
    with pytest.raises(NeedsWhole):
        follow(index, (x, [None, None, mask[0]]), {}, [out], lambda tensor: X if tensor is x else None)


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x.sum(),
        lambda x: x.mean(-1),
        lambda x: x.var((1, 2)),
        lambda x: x.max(-1),
        lambda x: x.softmax(-1),
        lambda x: x.topk(2),
        lambda x: x.cumsum(-1),
        lambda x: x.squeeze(),  # on a rank there may be one
        lambda x: x.squeeze(-1),
        lambda x: x.gather(1, ids(2, 1, 8)),
        lambda x: x.gather(-1, x.argsort(1)),
        lambda x: torch.zeros(2, 3, 8, device="meta").gather(1, x.argsort(1)),
        lambda x: x[..., [7, 6, 5, 4, 3, 2, 1, 0]],
        lambda x: x.scatter(1, ids(2, 1, 8), 1.0),
        lambda x: x.scatter(2, ids(2, 3, 1), 1.0),
        lambda x: x.scatter(1, x.argsort(1), torch.zeros(2, 3, 8, device="meta")),
        lambda x: torch.zeros(2, 3, 8, device="meta").scatter_add(1, x.argsort(1), x),
        lambda x: x.index_add(1, ids(3), torch.zeros(2, 3, 8, device="meta")),
        lambda x: x.transpose(0, 2) @ torch.zeros(8, 2, 5, device="meta"),
        lambda x: x[..., 0],
        lambda x: x[..., :4],
        lambda x: x[..., ::2],
        lambda x: x.chunk(2, -1),
        lambda x: x.unbind(-1),
        lambda x: torch.cat([x, torch.zeros(2, 3, 8, device="meta")], -1),
        lambda x: torch.cat([x, torch.zeros(2, 1, 8, device="meta")], 1),
        lambda x: x @ torch.zeros(2, 8, 4, device="meta"),
        lambda x: x * torch.zeros(8, device="meta"),
        lambda x: x + x.transpose(0, 2).reshape(2, 3, 8),
        lambda x: torch.nn.functional.layer_norm(x, (8,)),
        lambda x: torch.nn.functional.linear(x, torch.zeros(5, 8, device="meta")),
    ],
)
def test_needs_the_whole(make):
    with pytest.raises(NeedsWhole):
        moved(make, (2, 3, 8), X)


def conv(x, *kernel, **options):
    weight = torch.zeros(4, x.shape[1] // options.get("groups", 1), *kernel, device="meta")
    return torch.conv1d(x, weight, **options)


@pytest.mark.parametrize(
    ("make", "dim", "kept"),
    [
        (lambda x: torch.nn.functional.pad(x, (1, -1)), 2, False),  # a token later, and as many
        (lambda x: torch.nn.functional.pad(x, (0, 0, 1, -1)), 2, True),
        (lambda x: torch.nn.functional.pad(x, (0, 0, 1, -1)), 1, False),
        (lambda x: torch.nn.functional.pad(x, (1, -1)), 0, True),
        (lambda x: torch.view_as_complex(x.view(2, 4, 4, 2)), 2, True),
        (lambda x: torch.view_as_complex(x.view(2, 4, 4, 2)), 1, True),
        (lambda x: torch.view_as_complex(x.transpose(0, 2).contiguous()), 0, False),  # parts of numbers
        (lambda x: torch.view_as_real(x), 1, True),
        (lambda x: conv(x, 3, padding=1), 0, True),
        (lambda x: conv(x, 3, padding=1), 1, False),
        (lambda x: conv(x, 3, padding=1), 2, False),
        (lambda x: conv(x, 3, padding=1, groups=4), 1, False),  # of weights that are whole
        (lambda x: conv(x, 1), 2, True),
        (lambda x: conv(x, 1, stride=2), 2, False),
    ],
)
def test_where_a_dimension_stays(make, dim, kept):
    dtype = torch.complex64 if "view_as_real" in make.__code__.co_names else torch.float32
    shape = (2, 4, 8)
    if kept:
        assert moved(make, shape, ShardDim(dim), dtype)[0] == ShardDim(dim)
    else:
        with pytest.raises(NeedsWhole) as raised:
            moved(make, shape, ShardDim(dim), dtype)
        assert not isinstance(raised.value, NoRule)


def test_nothing_is_known_of_the_others():
    with pytest.raises(NoRule):
        moved(lambda x: torch.cdist(x, x), (2, 3, 8), X)


PACKED = ShardDim(2, components=(4, 2, 2))


@pytest.mark.parametrize(
    ("make", "places"),
    [
        (lambda x: x.split([4, 2, 2], -1), [ShardDim(2), ShardDim(2), ShardDim(2)]),
        (lambda x: x.split([4, 4], -1), [ShardDim(2), ShardDim(2, components=(2, 2))]),
        (lambda x: x[..., 4:6], [ShardDim(2)]),
        (lambda x: x[..., :6] * 2, [ShardDim(2, components=(4, 2))]),
        (lambda x: x * 2, [PACKED]),
        (lambda x: x[:, 0], [ShardDim(1, components=(4, 2, 2))]),
        (lambda x: x.view(6, 8), [ShardDim(1, components=(4, 2, 2))]),
        (lambda x: x.split(2, -1), NeedsWhole),
        (lambda x: x[..., 2:6], NeedsWhole),
        (lambda x: x * x.new_zeros(2, 3, 8), [PACKED]),
        (lambda x: x.new_empty(2, 3, 8).copy_(x), [PACKED]),
        (lambda x: x * torch.zeros(2, 3, 1, device="meta").expand(2, 3, 8), [PACKED]),
        (lambda x: x * torch.zeros(2, 3, 8, device="meta"), NeedsWhole),
        (lambda x: torch.cat([x, x[..., :4]], -1), [ShardDim(2, components=(4, 2, 2, 4))]),
        (lambda x: torch.cat([x[..., :4], x[..., :4]], -1), [ShardDim(2, components=(4, 4))]),
    ],
)
def test_components_are_taken_apart_at_their_boundaries(make, places):
    if places is NeedsWhole:
        with pytest.raises(NeedsWhole):
            moved(make, (2, 3, 8), PACKED)
    else:
        assert moved(make, (2, 3, 8), PACKED) == places


HEADS = ShardDim(2, components=(8, 4, 4))


@pytest.mark.parametrize(
    ("make", "place"),
    [
        (lambda x: x.view(2, 3, 8, 2), ShardDim(2, components=(4, 2, 2))),
        (lambda x: x.view(2, 3, 8, 2)[:, :, 4:6], ShardDim(2)),
        (lambda x: x.view(2, 3, 8, 2).view(2, 3, 16), HEADS),
        (lambda x: x.view(2, 3, 2, 8), NeedsWhole),  # a part of the second would be another component's
        (lambda x: x.view(6, 8, 2).view(2, 3, 16), HEADS),
    ],
)
def test_components_are_counted_as_a_view_counts(make, place):
    if place is NeedsWhole:
        with pytest.raises(NeedsWhole):
            moved(make, (2, 3, 16), HEADS)
    else:
        assert moved(make, (2, 3, 16), HEADS)[0] == place


FEW = ShardDim(2, components=(8, 2, 2), heads=(0, 1, 1))


@pytest.mark.parametrize(
    ("make", "places"),
    [
        (lambda x: x.split([8, 2, 2], -1), [ShardDim(2), ON_ALL_RANKS, ON_ALL_RANKS]),
        (lambda x: x.split([8, 4], -1), [ShardDim(2), ON_ALL_RANKS]),
        (lambda x: x.split([10, 2], -1), [ShardDim(2, components=(8, 2), heads=(0, 1)), ON_ALL_RANKS]),
        (lambda x: x.view(2, 3, 6, 2)[:, :, :4], [ShardDim(2)]),
        (lambda x: x.view(2, 3, 6, 2)[:, :, 5:], [ON_ALL_RANKS]),
        (lambda x: x * 2, [FEW]),
    ],
)
def test_one_head_is_on_all_ranks(make, places):
    assert moved(make, (2, 3, 12), FEW) == places


@pytest.mark.parametrize(
    ("along", "size", "tp", "length"),
    [
        (ShardDim(0), 12, 4, 3),
        (ShardDim(0, outer=3), 12, 2, 6),
        (ShardDim(0, components=(8, 4)), 12, 4, 3),
        (ShardDim(0, heads=(2,)), 12, 4, 6),
        (ShardDim(0, components=(8, 2, 2), heads=(0, 1, 1)), 12, 4, 6),
        (ShardDim(0, outer=2, components=(8, 4, 4), heads=(0, 2, 2)), 32, 4, 12),
    ],
)
def test_what_a_rank_has(along, size, tp, length):
    assert along.on_rank(size, tp) == length
