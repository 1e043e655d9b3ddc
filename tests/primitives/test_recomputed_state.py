"""What a module's code keeps from call to call is, under recompute, as if it had run once."""

import copy
import random
from contextlib import contextmanager
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

import megasched
from megasched.errors import ScheduleError
from megasched.layers.recompute.recompute import recompute
from megasched.layers.rng import fork_rng


class Averaging(nn.Module):
    """Scales by a moving average that it writes in place."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("average", torch.ones(8))

    def forward(self, x):
        y = self.linear(x)
        self.average.lerp_(y.detach().abs().mean((0, 1)), 0.1)
        return torch.tanh(y) / self.average


class Replacing(Averaging):
    """The same, with a new tensor each time."""

    def forward(self, x):
        y = self.linear(x)
        self.average = 0.9 * self.average + 0.1 * y.detach().abs().mean((0, 1))
        return torch.tanh(y) / self.average


class Counting(Averaging):
    """Scales by how often it was called."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        return torch.tanh(self.linear(x)) / self.calls


class Normed(Averaging):
    """Has a module of torch's that writes to its buffers."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x):
        return self.norm(torch.tanh(self.linear(x)).transpose(1, 2)).transpose(1, 2)


class Drawing(Averaging):
    """Scales by what Python's and numpy's generators give."""

    def forward(self, x):
        return torch.tanh(self.linear(x)) * (1 + random.random()) * (1 + float(np.random.random()))


class WritingLate(Averaging):
    """Begins to write after its first call."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        if self.calls > 1:
            self.average.mul_(0.9)
        return self.linear(x) / self.average


class Twice(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = nn.ModuleList([inner(), inner()])

    def forward(self, x):
        for module in self.inner:
            x = x + module(x)
        return x


def trained(model, steps=3, passes=1):
    """Losses, gradients, buffers and counters after some steps, of several backward passes through one graph."""
    random.seed(3)
    np.random.seed(3)
    torch.manual_seed(3)
    losses, optimizer = [], torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(step))
        loss = model(x).square().mean()
        for left in reversed(range(passes)):
            loss.backward(retain_graph=left > 0)
        losses.append(loss.detach())
        optimizer.step()
    grads = [p.grad for p in model.parameters()]
    counters = [getattr(module, "calls", 0) for module in model.modules()]
    return losses, grads, list(model.buffers()), counters, random.random(), np.random.random()


@pytest.mark.parametrize("inner", [Averaging, Replacing, Counting, Normed, Drawing])
def test_it_is_as_if_it_had_run_once(inner):
    torch.manual_seed(0)
    model = Twice(inner)
    recomputed = copy.deepcopy(model)
    schedule = megasched.create_schedule(recomputed)
    schedule["inner.*"].checkpoint()
    megasched.build(schedule)
    torch.testing.assert_close(trained(recomputed), trained(model), rtol=0, atol=0)


@pytest.mark.parametrize("inner", [Averaging, Counting, Drawing])
def test_each_backward_pass_through_one_graph_finds_the_state_of_its_forward(inner):
    model = Twice(inner)
    recomputed = copy.deepcopy(model)
    schedule = megasched.create_schedule(recomputed)
    schedule["inner.*"].checkpoint()
    megasched.build(schedule)
    torch.testing.assert_close(trained(recomputed, passes=2), trained(model, passes=2), rtol=0, atol=0)


def test_what_begins_to_be_written_later_is_refused():
    model = Twice(WritingLate)
    schedule = megasched.create_schedule(model)
    schedule["inner.*"].checkpoint()
    megasched.build(schedule)
    with pytest.raises(ScheduleError, match=r"writes to average, and did not in its first call") as refused:
        trained(model)
    assert refused.value.problems[0].module == "inner.0"


class Generators:
    """Tracks states as ``--te-rng-tracker`` does: they are generators, which go on as they are drawn from."""

    def __init__(self):
        self.states = {"model-parallel-rng": torch.Generator().manual_seed(3)}

    def is_initialized(self):
        return True

    def get_states(self):
        return dict(self.states)

    def set_states(self, states):
        self.states = states

    @contextmanager
    def fork(self, name="model-parallel-rng"):
        before, own = torch.get_rng_state(), self.states[name]
        torch.set_rng_state(own.get_state())
        try:
            yield
        finally:
            own.set_state(torch.get_rng_state())
            torch.set_rng_state(before)


def _dropped(x):
    with fork_rng():
        return nn.functional.dropout(x, 0.5) * x


def test_states_that_are_generators_are_those_of_the_first_forward(monkeypatch):
    found = []
    for run in (_dropped, partial(recompute, _dropped)):
        tracker, x = Generators(), torch.ones(64, requires_grad=True)
        monkeypatch.setattr("megatron.core.tensor_parallel.get_cuda_rng_tracker", lambda own=tracker: own)
        run(x).sum().backward()
        found.append((x.grad, tracker.states["model-parallel-rng"].get_state()))
    for plain, again in zip(*found, strict=True):
        assert torch.equal(plain, again)
