"""The split of a sequence under context parallelism is Megatron's, and can be undone."""

import pytest
import torch

from megasched.definition.sequence_split import Zigzag, causal_mask
from megasched.language.tensor_types import ShardDim


@pytest.mark.parametrize(("size", "rank", "places"), [(2, 0, [0, 1, 6, 7]), (2, 1, [2, 3, 4, 5]), (4, 3, [3, 4])])
def test_positions(size, rank, places):
    assert Zigzag(size, rank).positions(8 // size, torch.device("cpu")).tolist() == places


def _batch_of_megatron():
    from megatron.core import parallel_state
    from megatron.core.utils import get_batch_on_this_cp_rank

    from megasched.verify.ranks.pool import init_megatron

    init_megatron(cp=2)
    whole = torch.arange(24).view(2, 12)
    group = parallel_state.get_context_parallel_group()
    given = get_batch_on_this_cp_rank({"tokens": whole.clone()}, is_hybrid_cp=False, cp_group=group)["tokens"]
    return torch.equal(given, Zigzag(2, group.rank()).local_sequence(whole, ShardDim(1)))


def test_a_ranks_part_is_megatrons(ranks):
    assert ranks.run(2, _batch_of_megatron) == [True, True]


@pytest.mark.parametrize("along", [ShardDim(0), ShardDim(1), ShardDim(1, outer=3)])
def test_parts_in_rank_order_are_the_sequence_again(along):
    shape = [5, 5, 5]
    shape[along.dim] = 8 * along.outer
    whole = torch.randn(shape)
    parts = [Zigzag(2, rank).local_sequence(whole, along) for rank in range(2)]
    zigzag = Zigzag(2, 0)
    gathered = torch.cat([zigzag.sequence_first(part, along) for part in parts])
    assert torch.equal(zigzag.sequence_back(zigzag.in_order(gathered), along), whole)


def test_masks_go_by_true_places():
    whole = torch.ones(8, 8, dtype=torch.bool).tril()
    places = Zigzag(2, 1).positions(4, torch.device("cpu"))
    assert torch.equal(causal_mask(places, 8), whole[places])
    assert torch.equal(causal_mask(places, 8, window=3), (whole & whole.triu(-2).bool())[places])


def _gathered():
    from megatron.core import parallel_state

    from megasched.layers.context_parallel import CpGroup
    from megasched.verify.ranks.pool import init_megatron

    init_megatron(cp=2)
    ranks = CpGroup(parallel_state.get_context_parallel_group())
    whole = torch.arange(16.0).view(2, 8)
    part = ranks.zigzag.local_sequence(whole, ShardDim(1)).requires_grad_()
    got = ranks.gather(part, ShardDim(1))
    weights = torch.arange(16.0).view(2, 8).cos()
    (got * weights * (ranks.zigzag.rank + 1)).sum().backward()  # each rank has a part of the gradient
    return torch.equal(got, whole), torch.allclose(
        part.grad, ranks.zigzag.local_sequence(3 * weights, ShardDim(1))
    )


def test_gathering_sums_the_gradients_of_all_ranks(ranks):
    assert ranks.run(2, _gathered) == [(True, True)] * 2
