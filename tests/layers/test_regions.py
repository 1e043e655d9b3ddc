"""Each rank is handed its part of an argument, whatever the batch; what can't be shared out is a problem."""

import pytest
import torch
from torch import nn

from megasched import ParallelDims
from megasched.analysis.tp.sliced_args import ArgRef, ArgSlice
from megasched.layers.regions import slice_args, slices_of, sum_gradient
from megasched.plan.plan import Plan
from megasched.plan.record_checks import check_sliced_args


class Group:
    def __init__(self, rank, size):
        self._rank, self._size = rank, size

    def rank(self):
        return self._rank

    def size(self):
        return self._size


class Both(nn.Module):
    def forward(self, x, *, bias):
        return x, bias


@pytest.mark.parametrize("batch", [1, 2, 3])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_gets_its_own_heads(batch, rank):
    of_heads = torch.arange(4.0).view(1, 4, 1).expand(batch, 4, 5)  # [b, heads, s], each head its number
    merged = of_heads.reshape(batch * 4, 5)
    module = Both()
    slice_args(module, {0: ArgSlice(1, 4), "bias": ArgSlice(0, 4)}, Group(rank, 2))
    x, bias = module(of_heads, bias=merged)
    mine = torch.tensor([2.0 * rank, 2.0 * rank + 1])
    assert torch.equal(x, mine.view(1, 2, 1).expand(batch, 2, 5))
    assert torch.equal(bias, mine.repeat(batch)[:, None].expand(-1, 5))


def test_heads_that_tp_does_not_divide_are_a_problem():
    plan = Plan(ParallelDims(tensor_model_parallel_size=3), ())
    plan.tp_facts.parts = {ArgRef("attn", "alibi"): ArgSlice(0, 4), ArgRef("other", 1): ArgSlice(0, 6)}
    (problem,) = check_sliced_args(plan)
    assert (problem.module, problem.what) == (
        "attn",
        "TP 3 does not divide the 4 heads or features of argument 'alibi'",
    )
    assert slices_of(plan, "other") == {1: ArgSlice(0, 6)}


@pytest.mark.parametrize(("scale", "wanted"), [(None, 6.0), (0.5, 3.0)])
def test_a_gradient_is_summed_once_and_what_came_is_left_alone(monkeypatch, scale, wanted):
    """The same tensor may be another's gradient as well; a module's second call asks again."""
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda total, group: total.mul_(2))
    parameter, frozen = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2), requires_grad=False)
    for _ in range(2):
        sum_gradient(parameter, Group(0, 2), scale)
        sum_gradient(frozen, Group(0, 2), scale)
    gradient = torch.full((2,), 3.0)
    parameter.backward(gradient)
    assert parameter.grad.tolist() == [wanted, wanted]
    assert gradient.tolist() == [3.0, 3.0]
