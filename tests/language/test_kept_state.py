"""Recompute leaves what a module's code keeps from call to call as if the code had run once."""

import copy
import random
from collections import Counter, deque

import numpy
import pytest
import torch
from torch import nn

import megasched
from tests.lowering.models import randomize

X = torch.linspace(-1, 1, 32).reshape(4, 8)
LOSSES = deque()
CALLS = 0


class Stats:
    """Counts calls and keeps losses."""

    total = 0

    def __init__(self):
        self.calls, self.by_name = 0, {"losses": [[]]}

    def add(self, loss):
        self.calls += 1
        Stats.total += 1
        self.by_name["losses"][0].append(loss)
        return self.calls + Stats.total


class Keeps(nn.Module):
    """Computes by what it has kept, in one of many forms."""

    def __init__(self, code):
        super().__init__()
        self.linear, self.code = nn.Linear(8, 8), code
        self.stats, self.losses, self.names, self.last = {"calls": [0]}, [], set(), deque(maxlen=2)
        self.counter, self.object, self.draws = Counter(), Stats(), random.Random(3)
        self.numpy, self.torch = numpy.random.default_rng(3), torch.Generator().manual_seed(3)

    def forward(self, x):
        y = self.linear(x)
        return torch.tanh(y * self.code(self, y.square().mean()))  # torch recomputes no further than it has to


def in_a_nested_list(module, loss):
    module.stats["calls"][0] += 1
    return module.stats["calls"][0]


def in_a_list(module, loss):
    module.losses.append(loss)
    return len(module.losses)


def in_a_set(module, loss):
    module.names.add(len(module.names))
    return len(module.names)


def in_a_queue(module, loss):
    module.last.append(loss.detach())
    return sum(module.last)


def in_a_counter(module, loss):
    module.counter["calls"] += 1
    return module.counter["calls"]


def in_an_object(module, loss):
    return module.object.add(loss)


def in_a_global(module, loss):
    global CALLS
    CALLS += 1
    LOSSES.append(loss)
    return CALLS + len(LOSSES)


def cleared(module, loss):
    count = len(module.losses)
    module.losses.clear() if count > 1 else module.losses.append(loss)
    return 1 + count


def another(module, loss):
    module.losses = [*module.losses, loss]
    module.losses.append(loss)
    return len(module.losses)


def of_pythons_generator(module, loss):
    return module.draws.random()


def of_numpys_generator(module, loss):
    return float(module.numpy.random())


def of_torchs_generator(module, loss):
    return torch.rand((), generator=module.torch)


CODES = (
    *(
        in_a_nested_list,
        in_a_list,
        in_a_set,
        in_a_queue,
        in_a_counter,
        in_an_object,
        in_a_global,
        cleared,
        another,
    ),
    *(of_pythons_generator, of_numpys_generator, of_torchs_generator),
)


class Whole(nn.Module):
    """Adds the losses that its layer has appended, and clears them."""

    def __init__(self, code):
        super().__init__()
        self.inner = Keeps(code)

    def forward(self, x):
        y = self.inner(x).square().sum()
        if self.inner.code is in_a_list:
            y = y + sum(self.inner.losses)
            self.inner.losses.clear()
        return y


def steps(model):
    """Outputs, gradients and what was kept, of three steps of two forwards."""
    global CALLS
    CALLS, Stats.total = 0, 0
    LOSSES.clear()
    found = []
    for step in range(3):
        model.zero_grad()
        (model(X * (step + 1)) + model(X)).backward()
        inner = model.inner
        kept = (inner.stats, len(inner.losses), inner.names, list(inner.last), inner.counter, inner.object.calls)
        kept = (*kept, len(inner.object.by_name["losses"][0]), Stats.total, CALLS, len(LOSSES))
        found.append(([p.grad.tolist() for p in model.parameters()], model(X).item(), copy.deepcopy(kept)))
    return found


def built(model):
    sch = megasched.create_schedule(model)
    sch["inner"].checkpoint()
    return megasched.build(sch, inputs={"x": X})


@pytest.mark.parametrize("code", CODES)
def test_it_is_as_if_the_code_had_run_once(code):
    model = randomize(Whole(code)).train()
    scheduled = copy.deepcopy(model)
    assert steps(built(scheduled)) == steps(model)


def test_a_tensor_in_a_container_that_is_written_to_is_refused():
    def written(module, loss):
        return module.stats.setdefault("mean", torch.ones(())).mul_(0.5)

    model = built(randomize(Whole(written)).train())
    model(X)
    with pytest.raises(megasched.ScheduleError, match="writes to a tensor in a container") as raised:
        model(X)
    assert raised.value.problems[0].module == "inner"
