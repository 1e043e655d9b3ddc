"""Code that does more than return a result: a graph would lose that, and a module that stays a call does it."""

import copy
import random
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import megasched
from megasched.graph.intercept import Limits
from megasched.graph.traced import trace_module
from tests.graph.running import graphs_run
from tests.graph.test_primitives import X, alike, backward, refusal
from tests.lowering.models import Mlp, randomize

TOTALS = {"calls": 0}


class Kept(nn.Module):
    """Keeps something of each kind, of which a test's own class changes one."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Linear(8, 8)
        self.register_buffer("mean", torch.ones(8))
        self.calls, self.stats, self.outputs = 0, {"calls": 0}, []
        self.aux = torch.zeros(())
        self.last = torch.ones(())
        self.generator = random.Random(3)


class Counts(Kept):
    def forward(self, x):
        self.calls += 1
        return self.scale(x) * self.calls


class CountsInMapping(Kept):
    def forward(self, x):
        self.stats["calls"] += 1
        return self.scale(x) * self.stats["calls"]


class CountsInGlobal(Kept):
    def forward(self, x):
        TOTALS["calls"] += 1
        return self.scale(x) * TOTALS["calls"]


class Leaves(Kept):
    def forward(self, x):
        self.aux = x.square().mean()
        return self.scale(x)


class Collects(Kept):
    def forward(self, x):
        self.outputs.append(x.detach().mean())
        return self.scale(x) * len(self.outputs)


class DrawsInPython(Kept):
    def forward(self, x):
        return self.scale(x) * random.random()


class DrawsOfItsOwn(Kept):
    def forward(self, x):
        return self.scale(x) * self.generator.random()


class Averages(Kept):
    def forward(self, x):
        with torch.no_grad():
            self.mean.lerp_(x.abs().mean((0, 1)), 0.1)
        return self.scale(x) / self.mean


class AveragesAnew(Kept):
    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.detach().abs().mean((0, 1))
        return self.scale(x) / self.mean


class WritesToAttribute(Kept):
    def forward(self, x):
        self.last.add_(1)
        return self.scale(x) * self.last


class Normalizes(nn.BatchNorm1d):
    def __init__(self):
        super().__init__(3)


class WithoutCount(Normalizes):
    """torch's kernel writes to its running statistics, which no operation of the graph says."""

    def __init__(self):
        super().__init__()
        self.num_batches_tracked = None


CHANGES = {
    Counts: "changes calls, which it keeps",
    CountsInMapping: "changes stats['calls'], which",
    CountsInGlobal: "changes tests.graph.test_effects.TOTALS['calls'] outside of",
    Leaves: "changes aux, which",
    Collects: "changes outputs[0], which",
    DrawsInPython: "draws random numbers of Python's",
    DrawsOfItsOwn: "changes generator, which",
    Averages: "writes to mean in its forward",
    AveragesAnew: "changes mean, which",
    WritesToAttribute: "writes to last in its forward",
    Normalizes: "writes to num_batches_tracked, running_mean, running_var in its forward",
    WithoutCount: "writes to running_mean, running_var in its forward",
}


@pytest.mark.parametrize("kind", CHANGES, ids=lambda kind: kind.__name__)
def test_what_a_graph_would_lose_is_refused_and_a_call_does_it_once(kind):
    inner = kind()
    sch = megasched.create_schedule(nn.Sequential(nn.Sequential(randomize(Mlp()), randomize(inner))))
    said = refusal(sch["0.1"].trace, inputs={"x" if isinstance(inner, Kept) else "input": X})
    assert CHANGES[kind] in said
    assert "is not traced" in refusal(sch["0.1"].find, ".*")
    said = refusal(sch["0"].trace, inputs={"input": X})
    of_no_module = kind in (CountsInGlobal, DrawsInPython)
    assert ('leaves=["1"]' in said) is not of_no_module
    if kind is CountsInGlobal:  # for which other threads of a run may look, so that it can't be put back
        said = refusal(sch["0"].trace, inputs={"input": X}, leaves=["1"])
        assert "changes tests.graph.test_effects.TOTALS['calls'] outside of modules, and what stays a call" in said
        return
    sch["0"].trace(inputs={"input": X}, leaves=["1"])
    found = []
    for model in (copy.deepcopy(sch.mod), megasched.build(sch)):
        random.seed(5)
        TOTALS["calls"] = 0
        steps = [backward(model, X * step) for step in (1, 2, 3)]
        kept = [getattr(model[0][1], name, None) for name in ("calls", "stats", "outputs", "aux", "last", "mean")]
        found.append([*steps, [*model.buffers()], kept, TOTALS["calls"], random.random()])
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


class Outer(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.up, self.inner = nn.Linear(8, 8), inner

    def forward(self, x):
        y = self.up(x) * 3
        return self.inner(y) + y.sum()


def test_code_that_writes_to_what_it_is_handed_is_refused():
    class Doubles(nn.Module):
        def forward(self, x):
            x.mul_(2)
            return x + 1

    sch = megasched.create_schedule(Outer(Doubles()))
    assert "writes to x in its forward" in refusal(sch["inner"].trace, inputs={"x": X})

    class Notes(nn.Module):
        def forward(self, x, notes):
            notes["mean"] = x.mean()
            return x + 1

    notes = Notes()
    trace_module(notes, Limits())
    assert "changes a list or dictionary that it is handed" in refusal(notes, X, {"sum": X.sum()})


def test_a_module_that_stays_a_call_writes_to_its_input_once():
    class Doubles(nn.Module):
        def forward(self, x):
            return x.mul_(2) + 1

    sch = megasched.create_schedule(nn.Sequential(Outer(Doubles())))
    sch["0"].trace(inputs={"x": X}, leaves=["inner"])
    want = backward(copy.deepcopy(sch.mod))
    assert alike(backward(megasched.build(sch)), want)


def test_a_weight_that_no_module_has_is_refused():
    class Reads(nn.Module):
        def __init__(self, other):
            super().__init__()
            self.other = [other]

        def forward(self, x):
            return x @ self.other[0].weight

    outer = Outer(nn.Identity())
    outer.inner = Reads(outer.up)
    sch = megasched.create_schedule(outer)
    said = refusal(sch["inner"].trace, inputs={"x": X})
    assert (
        "the gradient of a tensor that is neither an argument nor a parameter of its modules would be lost" in said
    )
    assert "test_effects.py:" in said.split("asked for")[0]
    sch[""].trace(inputs={"x": X})
    want = backward(copy.deepcopy(outer))
    assert alike(backward(megasched.build(sch)), want)


def forms_of_call(kind, change, values):
    """How many graphs a module has that is changed before each call; what it returns is what it would without."""
    model = nn.Sequential(kind())
    plain = copy.deepcopy(model)
    sch = megasched.create_schedule(model)
    sch["0"].trace(inputs={"x": X})
    built = megasched.build(sch)
    with graphs_run() as ran:
        for value in values:
            for each in (built, plain):
                change(each[0], *value)
            assert torch.equal(built(X), plain(X))
    return len({id(graph) for graph in ran})


def test_numbers_and_tensors_in_attributes_are_read_when_it_runs():
    class Scales(nn.Module):
        def __init__(self):
            super().__init__()
            self.by, self.table = 2.0, torch.tensor(1.0)

        def forward(self, x):
            return x * self.by + self.table

    def change(scales, by, table):
        scales.by, scales.table = by, torch.tensor(table)

    # Values of a tensor are no other form of call.
    assert forms_of_call(Scales, change, [(2.0, 1.0), (3.0, 1.0), (3.0, 4.0)]) == 2


def test_numbers_in_objects_of_attributes_are_other_forms_of_call():
    class Scales(nn.Module):
        def __init__(self):
            super().__init__()
            self.config = SimpleNamespace(by=2.0, inner=SimpleNamespace(off=[1.0]), labels=list(range(100)))
            self.config.itself = self.config

        def forward(self, x):
            return x * self.config.by + self.config.inner.off[0]

    def change(scales, by, off):
        scales.config.by, scales.config.inner.off[0] = by, off

    assert forms_of_call(Scales, change, [(2.0, 1.0), (3.0, 1.0), (3.0, 4.0), (2.0, 1.0)]) == 3


def test_a_tensor_that_needs_a_gradient_is_another_form_of_call():
    class Asks(nn.Module):
        def forward(self, x):
            return x * 2 if x.requires_grad else x * 3

    sch = megasched.create_schedule(nn.Sequential(Asks()))
    sch["0"].trace(inputs={"x": X})
    built = megasched.build(sch)
    for x, by in ((X, 3), (X.clone().requires_grad_(), 2), (X, 3)):
        assert torch.equal(built(x), x * by)


def _seeds(x):
    torch.manual_seed(3)
    return torch.rand_like(x)


def _forks(x):
    with torch.random.fork_rng(devices=[]):
        return torch.rand_like(x)


def _drops_the_same(x):
    state = torch.get_rng_state()
    x = F.dropout(x, 0.5)
    torch.set_rng_state(state)
    return F.dropout(x, 0.5)


@pytest.mark.parametrize("draw", [_seeds, _forks, _drops_the_same])
def test_code_that_sets_a_random_state_is_refused_and_a_call_does_it(draw):
    class Draws(nn.Module):
        def forward(self, x):
            return draw(x)

    sch = megasched.create_schedule(nn.Sequential(nn.Sequential(nn.Linear(8, 8), Draws())))
    assert "a random state that" in refusal(sch["0"].trace, inputs={"input": X})
    sch["0"].trace(inputs={"input": X}, leaves=["1"])
    found = []
    for model in (copy.deepcopy(sch.mod), megasched.build(sch)):
        torch.manual_seed(1)
        found.append([model(X).detach() for _ in range(2)])
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


def test_modules_that_differ_in_a_function_or_a_tuple_have_graphs_of_their_own():
    class Acts(nn.Module):
        def __init__(self, act, sizes):
            super().__init__()
            self.act, self.sizes = act, sizes

        def forward(self, x):
            return self.act(x).reshape(self.sizes)

    model = nn.Sequential(Acts(F.relu, (48,)), Acts(F.silu, (48,)), Acts(F.silu, (6, 8)))
    sch = megasched.create_schedule(model)
    for node in sch:
        node.trace(inputs={"x": X})
    assert sch["0"].find("relu")
    assert not sch["1"].find("relu", missing_ok=True)
    assert sch["1"].find("silu")
    sch["1"].checkpoint(sch["1"].find("silu")[0])
    assert torch.equal(megasched.build(sch)[1](X), F.silu(X).reshape(48))


def test_a_config_may_be_a_mapping():
    mlp = randomize(Mlp())
    mlp.config = {"use_cache": True}
    sch = megasched.create_schedule(mlp)
    sch["act"].trace(inputs={"input": X})
    want = copy.deepcopy(mlp)(X)
    assert torch.equal(megasched.build(sch)(X), want)
