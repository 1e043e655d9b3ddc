"""What stays live in a graph, and what would be lost in one: hooks, wrapped modules, hooks on gradients."""

import copy
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.func import functional_call

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


class Inner(nn.Module):
    """Leaves something beside the tensor that it returns, in a way that ``how`` names."""

    how = ""

    def __init__(self):
        super().__init__()
        self.up, self.calls, self.aux, self.notes = nn.Linear(8, 8), 0, None, {}

    def forward(self, x, losses=()):
        y = self.up(x)
        loss = y.square().mean()
        match self.how:
            case "attribute":
                self.aux = loss
            case "class attribute":
                self.best = loss
            case "number":
                self.calls += 1
            case "container":
                self.notes["loss"] = loss
            case "list":
                losses.append(loss)
            case "object":
                return Result(y)
            case "iterator":
                return iter([y])
        return y

    best = None


@dataclass
class Result:
    tensor: torch.Tensor


class Around(nn.Module):
    how = ""

    def __init__(self):
        super().__init__()
        self.inner, self.own = Inner(), nn.Linear(8, 8)
        self.inner.how = self.how
        self.notes = {} if self.how != "shared container" else self.inner.notes

    def forward(self, x):
        losses = []
        y = self.inner(self.own(x), losses)
        match self.how:
            case "attribute":
                return y + self.inner.aux
            case "class attribute":
                return y if self.inner.best is None else y + self.inner.best
            case "number":
                return y * self.inner.calls
            case "container" | "shared container":
                return y + self.inner.notes.get("loss", 0)
            case "list":
                return y + sum(losses)
            case "object":
                return y.tensor
            case "iterator":
                return next(y)
        return y


LEFT = {
    "attribute": "its code reads aux, which 0.inner sets, a call that a graph does not look into",
    "class attribute": "its code reads best, which",
    "number": "its code reads calls, which",
    "container": "its code reads notes, which",
    "list": "0.inner, which stays a call, changes a list or dictionary that it is handed",
    "object": "0.inner, which stays a call, returns a Result",
    "iterator": "0.inner, which stays a call, returns a list_iterator",
}


@pytest.mark.parametrize("how", LEFT)
def test_what_a_call_leaves_beside_tensors_and_the_code_around_it_reads_is_refused(how, monkeypatch):
    monkeypatch.setattr(Around, "how", how)
    torch.manual_seed(3)
    sch = megasched.create_schedule(nn.Sequential(nn.Sequential(Around())))
    said = refusal(sch["0"].trace, inputs={"input": X}, leaves=["0.inner"])
    assert LEFT[how] in said
    sch["0"].trace(inputs={"input": X}, leaves=["0"])
    plain = copy.deepcopy(sch.mod)
    want = [backward(plain, X * step) for step in (1, 2, 3)]
    built = megasched.build(sch)
    assert all(alike(backward(built, X * step), each) for step, each in zip((1, 2, 3), want, strict=True))


def test_what_a_call_counts_and_nobody_reads_is_no_fault():
    around = Around()
    around.inner.how = "number"
    sch = megasched.create_schedule(nn.Sequential(around))
    sch["0"].trace(inputs={"x": X}, leaves=["inner"])
    built = megasched.build(sch)
    for _ in range(3):
        built(X)
    assert built[0].inner.calls == 3


def test_a_call_that_changes_what_another_module_keeps_is_refused():
    around = Around()
    around.shared = around.inner.notes
    around.inner.how = "container"
    sch = megasched.create_schedule(nn.Sequential(around))
    said = refusal(sch["0"].trace, inputs={"x": X}, leaves=["inner"])
    assert "a module that stays a call changes shared['loss'] outside of it, which a graph may read" in said


def test_an_object_with_tensors_in_it_is_no_argument_of_a_call():
    class Takes(nn.Module):
        def forward(self, result):
            return result.tensor * 2

    class Hands(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Takes()

        def forward(self, x):
            return self.inner(Result(x + 1))

    sch = megasched.create_schedule(nn.Sequential(Hands()))
    said = refusal(sch["0"].trace, inputs={"x": X}, leaves=["inner"])
    assert "inner, which stays a call, is handed a Result with tensors in it" in said


def test_a_number_that_a_call_returns_must_stay():
    class Numbers(nn.Module):
        def __init__(self):
            super().__init__()
            self.calls = 0

        def forward(self, x):
            self.calls += 1
            return x, min(self.calls, 3)

    class Takes(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Numbers()

        def forward(self, x):
            y, by = self.inner(x)
            return y * by

    model = nn.Sequential(Takes())
    model[0].inner.calls = 4
    sch = megasched.create_schedule(model)
    sch["0"].trace(inputs={"x": X}, leaves=["inner"])
    built = megasched.build(sch)
    for _ in range(2):
        assert torch.equal(built(X), X * 3)
    built[0].inner.calls = 1
    said = refusal(built, X)
    assert "inner, which stays a call in a graph, returns ((2, 3, 8), 2) now" in said
    assert "returned ((2, 3, 8), 3) when the graph was made" in said
    assert "test_live_calls.py:" in said


def test_a_call_with_the_parameters_of_another_is_refused():
    class Functional(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.Linear(8, 8)

        def forward(self, x):
            return functional_call(self.up, {"weight": self.up.weight * 2}, (x,))

    sch = megasched.create_schedule(nn.Sequential(Functional()))
    said = refusal(sch["0"].trace, inputs={"x": X})
    assert "up, which stays a call, computes with other parameters than its own (functional_call)" in said


def test_a_result_that_holds_more_than_tensors_and_data_is_refused():
    class Returns(nn.Module):
        def __init__(self, make):
            super().__init__()
            self.make = make

        def forward(self, x):
            return self.make(x)

    told = {
        "it returns a number that it makes of a tensor": lambda x: (x * 2, x.mean().item()),
        "it returns a Result": lambda x: Result(x * 2),
    }
    for what, make in told.items():
        sch = megasched.create_schedule(nn.Sequential(Returns(make)))
        assert what in refusal(sch["0"].trace, inputs={"x": X})


def test_code_that_asks_for_the_function_behind_a_tensor_is_refused():
    class Hooked(nn.Module):
        def forward(self, x):
            y = x * 2
            if y.grad_fn is not None:
                y.grad_fn.register_prehook(lambda gradients: (gradients[0] * 3,))
            return y

    sch = megasched.create_schedule(nn.Sequential(Hooked()))
    assert "the grad_fn of a tensor, such as a hook on it, would be lost" in refusal(
        sch["0"].trace, inputs={"x": X}
    )
