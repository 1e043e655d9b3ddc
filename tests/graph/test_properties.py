"""Random graphs: a planted pattern is found once however it is spelled, a convex part can be run by itself, and
others are refused."""

import math

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from megasched.errors import ScheduleError
from megasched.graph import patterns
from megasched.graph.capture import capture
from megasched.graph.intercept import Limits
from megasched.graph.partition import Edit, apply_edit, is_tangled
from megasched.language.subgraph import Subgraph

SHAPE = (2, 8)


def product(a, b):
    return torch.remainder(a * b, 7.0)


# All exact on small whole numbers, gradients too: so the order in which gradients are added changes no bit.
UNARY = (torch.neg, torch.relu, torch.abs)
BINARY = (torch.add, torch.sub, torch.maximum, product)


class Random(nn.Module):
    """Runs steps, each (function, numbers of the values that it reads); what no step reads is added up.

    Values 0 and 1 are x and y, [2, 8]; value 2 is the parameter; step n gives value n + 3.
    """

    def __init__(self, steps):
        super().__init__()
        self.steps = steps
        self.weight = nn.Parameter(torch.arange(16.0).reshape(SHAPE) % 5 - 2)

    def forward(self, x, y):
        values, read = [x, y, self.weight], set()
        for function, numbers in self.steps:
            values.append(function(*(values[number] for number in numbers)))
            read.update(numbers)
        return torch.stack([value for number, value in enumerate(values) if number not in read]).sum(0)


@st.composite
def random_steps(draw, least=3, most=8, back=4):
    """At most so many steps, each reading values no further back than that."""
    found = []
    for number in range(draw(st.integers(least, most))):
        function = draw(st.sampled_from((*UNARY, *BINARY)))
        reads = st.integers(max(0, number + 3 - back), number + 2)
        found.append((function, tuple(draw(reads) for _ in range(2 if function in BINARY else 1))))
    return found


def inputs():
    whole = torch.arange(16.0).reshape(SHAPE)
    return [(whole % 7 - 3).requires_grad_(), (whole % 4 - 1).requires_grad_()]


def graph_of(model):
    return capture(model, model.forward, tuple(inputs()), {}, Limits())


def values_of(run, model):
    """Output, and gradients of x, y and the parameter; None where there is none."""
    tensors = inputs()
    model.zero_grad()
    output = run(*tensors)
    (output * torch.arange(1.0, 17.0).reshape(SHAPE)).sum().backward()
    return [output.detach(), *(each.grad for each in (*tensors, model.weight))]


def same(one, other):
    return all((a is None and b is None) or torch.equal(a, b) for a, b in zip(one, other, strict=True))


def itself(names, path=""):
    return Edit(Subgraph(path, tuple(names)), lambda part: part.graph)


def chosen(data, names, least=1, most=5):
    found = data.draw(st.sets(st.sampled_from(names), min_size=least, max_size=most))
    return [name for name in names if name in found]


def is_convex(graph, names):
    """By its definition: no way from a member through others back to a member."""
    members = {graph.names[name] for name in names}
    outside = {user for member in members for user in member.users} - members
    seen = set()
    while outside:
        node = outside.pop()
        if node in members:
            return False
        seen.add(node)
        outside |= set(node.users) - seen
    return True


@settings(max_examples=40)
@given(steps=random_steps(), data=st.data())
def test_a_part_runs_by_itself_if_and_only_if_it_is_convex(steps, data):
    model = Random(steps)
    want = values_of(model, model)
    graph = graph_of(model)
    names = chosen(data, list(graph.names))
    convex = is_convex(graph, names)
    event(f"convex: {convex}")
    if not convex:
        with pytest.raises(ScheduleError, match="lies between two inside"):
            apply_edit(graph, itself(names), "")
    else:
        apply_edit(graph, itself(names), "")
    # Refused, the graph is as it was.
    assert same(values_of(lambda *tensors: graph.run(model, list(tensors)), model), want)


@settings(max_examples=40)
@given(steps=random_steps(least=4, back=9), data=st.data())
def test_two_parts_run_by_themselves_in_either_order_unless_they_are_tangled(steps, data):
    model = Random(steps)
    want = values_of(model, model)
    graph = graph_of(model)
    first = chosen(data, list(graph.names), 2, 2)
    second = chosen(data, [name for name in graph.names if name not in first], 2, 2)
    if not (is_convex(graph, first) and is_convex(graph, second)):
        return
    tangled = is_tangled(graph, [first, second])
    event(f"tangled: {tangled}")
    for one, other in ((first, second), (second, first)):
        graph = graph_of(model)
        apply_edit(graph, itself(one), "")
        if tangled:
            with pytest.raises(ScheduleError, match="lies between two inside"):
                apply_edit(graph, itself(other), "")
            continue
        apply_edit(graph, itself(other), "")
        assert same(values_of(lambda *tensors, graph=graph: graph.run(model, list(tensors)), model), want)


def turned(draw, a, b, operation):
    return operation(b, a) if draw(st.booleans()) else operation(a, b)


def cast(draw, value):
    """As it is, or converted: to what it is already, or to more digits."""
    dtype = draw(st.sampled_from((None, torch.float32, torch.float64)))
    return value if dtype is None else value.to(dtype)


def swiglu(draw, gate, up):
    form = draw(st.sampled_from((F.silu, nn.SiLU(), None)))
    gated = turned(draw, gate, torch.sigmoid(gate), torch.mul) if form is None else form(gate)
    return turned(draw, cast(draw, gated), up, torch.mul)


def bias_gelu(draw, x, bias):
    x = turned(draw, x, bias, torch.add)
    form = draw(st.sampled_from(("erf", "tanh", "erf by hand", "tanh by hand", "sigmoid")))
    if form in ("erf", "tanh"):
        return F.gelu(x, approximate="none" if form == "erf" else "tanh")
    if form == "sigmoid":
        return turned(draw, x, torch.sigmoid(x * 1.702), torch.mul)
    if form == "erf by hand":
        inner = torch.erf(x / math.sqrt(2.0))
    else:
        inner = torch.tanh(math.sqrt(2 / math.pi) * turned(draw, x, 0.044715 * x**3, torch.add))
    half = x * 0.5 if draw(st.booleans()) else 0.5 * x
    return turned(draw, cast(draw, half), inner + 1 if draw(st.booleans()) else 1 + inner, torch.mul)


def rms_norm(draw, x, weight):
    wide = cast(draw, x)
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
    return turned(draw, weight, turned(draw, wide, scale, torch.mul).to(x.dtype), torch.mul)


PLANTS = {"swiglu": swiglu, "bias_gelu": bias_gelu, "rms_norm": rms_norm}


class Draws:
    """Answers of ``draw`` in the order of the first run, so that every run of a module makes the same choices."""

    def __init__(self, draw):
        self.draw, self.known, self.place = draw, [], 0

    def __call__(self, strategy):
        if self.place == len(self.known):
            self.known.append(self.draw(strategy))
        self.place += 1
        return self.known[self.place - 1]


@pytest.mark.parametrize("name", PLANTS)
@settings(max_examples=25)
@given(steps=random_steps(least=1, most=5), data=st.data())
def test_a_planted_pattern_is_found_once_and_can_be_taken_out(name, steps, data):
    draws = Draws(lambda strategy: data.draw(strategy))
    place = data.draw(st.integers(0, len(steps)))
    reads = tuple(data.draw(st.integers(0, place + 2)) for _ in range(2))

    def plant(a, b):
        draws.place = 0
        return PLANTS[name](draws, a, b).float()

    later = [(f, tuple(n + (n >= place + 3) for n in numbers)) for f, numbers in steps[place:]]
    model = Random([*steps[:place], (plant, reads), *later])
    want = values_of(model, model)
    graph = graph_of(model)
    found = getattr(patterns, name).find(graph, "")
    assert len(found) == 1, list(graph.names)
    assert found[0].pattern.partition(":")[0] == name
    assert len(found[0].inputs) == 2
    apply_edit(graph, Edit(found[0], lambda part: part.graph), "")
    got = values_of(lambda *tensors: graph.run(model, list(tensors)), model)
    assert torch.equal(got[0], want[0])
    for mine, theirs in zip(got[1:], want[1:], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-4)
