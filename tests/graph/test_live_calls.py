"""What stays live in a graph, and what would be lost in one: hooks, wrapped modules, hooks on gradients."""

import copy

import pytest
import torch
from torch import nn

import megasched
from megasched.graph import patterns
from megasched.graph.intercept import Limits
from megasched.graph.traced import trace_module
from tests.graph.running import graphs_run
from tests.graph.test_primitives import X, alike, backward, refusal, schedule
from tests.language.replacing import Doubled
from tests.lowering.models import Mlp, randomize


def test_a_hook_that_comes_later_runs_from_then_on():
    built = megasched.build(schedule(randomize(Mlp())))
    seen = []
    first = built(X)
    handle = built[0].act.register_forward_hook(lambda module, args, output: seen.append(1) or output * 2)
    with graphs_run() as ran:
        hooked = built(X)
    assert list(ran[0].names) == ["up", "act", "drop.dropout", "down"]
    assert len(seen) == 2  # once in the run before the trace, and once in the graph
    assert torch.equal(hooked, built[0].down(built[0].act(built[0].up(X))))
    handle.remove()
    assert torch.equal(built(X), first)


def test_hooks_that_wait_for_parameters_run_before_the_graph_that_reads_them():
    """As Megatron's overlapped gather of parameters: the norm's weight is stale until its hook has run."""

    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.up = nn.LayerNorm(8), nn.Linear(8, 8)

        def forward(self, x):
            return self.up(self.norm(x))

    module = randomize(Normed())
    want = copy.deepcopy(module)(X)
    fresh = module.norm.weight.detach().clone()

    def gather(norm, args):
        with torch.no_grad():
            norm.weight.copy_(fresh)

    for hooked_before in (True, False):
        each = copy.deepcopy(module)
        trace_module(each, Limits(frozenset({"up"}), waits=lambda hook: hook is gather))
        if not hooked_before:
            each(X)
        each.norm.register_forward_pre_hook(gather)
        for _ in range(2):
            with torch.no_grad():
                each.norm.weight.zero_()
            with graphs_run() as ran:
                assert torch.equal(each(X), want)
            assert list(ran[0].names) == ["norm.layer_norm", "up"]  # such a hook keeps no module a call


def test_a_hook_on_a_gradient_is_refused():
    class Hooked(nn.Module):
        def forward(self, x):
            if x.requires_grad:
                x.register_hook(self.double)
            return x * 3

        def double(self, gradient):
            return gradient * 2

    sch = megasched.create_schedule(nn.Sequential(nn.Sequential(nn.Linear(8, 8), Hooked())))
    sch["0"].trace(inputs={"input": X})
    said = refusal(megasched.build(sch), X.clone().requires_grad_())
    assert "Hooked.double, which register_hook puts on the gradient of a tensor, would be lost" in said
    assert "module: 0.1" in said
    sch = megasched.create_schedule(nn.Sequential(nn.Sequential(nn.Linear(8, 8), Hooked())))
    sch["0"].trace(inputs={"input": X}, leaves=["1"])
    want = backward(copy.deepcopy(sch.mod))
    assert alike(backward(megasched.build(sch)), want)


@pytest.mark.parametrize(
    "ask",
    [
        lambda node: node.checkpoint(),
        lambda node: node.fork_rng(),
        lambda node: node.hook("fw_post", print),
        lambda node: node.sync("fwd_post", torch.clone),
    ],
    ids=["checkpoint", "fork_rng", "hook", "sync"],
)
def test_an_edit_inside_a_module_that_another_call_keeps_whole_is_refused(ask):
    sch = schedule()
    sch["0"].fuse(sch["0"].find(patterns.gelu)[0])
    ask(sch["0.act"])
    said = refusal(megasched.build, sch)
    assert "act.gelu is no operation of the graph when it runs" in said
    assert said.count("test_live_calls.py:") == 2  # of both calls
    assert 'sch["0.act"].trace()' in said


def test_a_linear_that_is_decomposed_and_hooked_is_refused():
    sch = schedule(decompose=["up"])
    built = megasched.build(sch)
    built[0].up.register_forward_hook(lambda *args: None)
    said = refusal(built, X)
    assert "hooks of a linear that is decomposed would be lost" in said
    assert "leave the hook or the decompose call out" in said


@pytest.mark.parametrize(
    "ask",
    [
        lambda node: node.adapt(rank=2),
        lambda node: node.checkpoint(),
        lambda node: node.hook("fw_post", print),
        lambda node: node.probe(),
        lambda node: node.sync("fwd_post", torch.clone),
    ],
    ids=["adapt", "checkpoint", "hook", "probe", "sync"],
)
def test_a_linear_that_is_decomposed_and_one_call_is_refused(ask):
    sch = schedule(decompose=["up"])
    ask(sch["0.up"])
    said = refusal(megasched.build, sch)
    assert "is decomposed, and " in said
    assert "makes it one call in a graph" in said


def test_a_linear_that_computes_more_is_not_decomposed():
    """Product and bias would be all that a run computes: of the definition's linear, or of what replaces it."""
    mlp = randomize(Mlp())
    mlp.up = Doubled(8, 16)
    assert "Doubled, which computes or holds more" in refusal(schedule, mlp, decompose=["up"])
    sch = schedule(decompose=["up"])
    sch["0.up"].replace(lambda old: Doubled(8, 16))
    assert "its graph is of the definition's Linear, which Doubled replaces" in refusal(megasched.build, sch)
