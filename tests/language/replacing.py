"""Modules that tests replace, and by what."""

import pytest
import torch
from torch import nn

import megasched
from megasched import ParallelDims, ScheduleError
from tests.lowering.models import Mlp


class Scale(nn.Module):
    """RMS norm under names of its own."""

    def __init__(self, size):
        super().__init__()
        self.gain = nn.Parameter(torch.zeros(size))

    def forward(self, x):
        return self.gain * x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5)


class Block(nn.Module):
    """A norm, a pair of linears, running statistics, an activation."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8, bias=False)
        self.mlp = Mlp()
        self.batch = nn.BatchNorm1d(8, affine=False)

    def forward(self, x):
        return self.mlp(self.norm(x))


class Around(nn.Module):
    """A module around another, whose parameters have one name more."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *args, **kwargs):
        return self.inner(*args, **kwargs)


class Doubled(nn.Linear):
    """A linear by its class, so that a graph calls it, which computes more than ``nn.Linear``."""

    def forward(self, x):
        return 2 * super().forward(x)


class Fused(nn.Module):
    """Both linears of an Mlp in one parameter each."""

    def __init__(self):
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(2, 16, 8))
        self.biases = nn.Parameter(torch.zeros(24))

    def forward(self, x):
        up = nn.functional.gelu(x @ self.weights[0].T + self.biases[:16])
        return up @ self.weights[1] + self.biases[16:]


FUSED = {
    "weights": lambda old: torch.stack([old["up.weight"], old["down.weight"].T]),
    "biases": lambda old: torch.cat([old["up.bias"], old["down.bias"]]),
}
X = torch.linspace(-1, 1, 24).reshape(3, 8)


def schedule(model):
    return megasched.create_schedule(model, ParallelDims())


def built(model, fill, **arguments):
    sch = schedule(model)
    fill(sch)
    return megasched.build(sch, **arguments)


def refused(model, fill, **arguments):
    """The problems; checks that the model is what it was and that each names its line in this file."""
    before = dict(model.named_modules())
    parameters = {name: (id(p), dict(p.__dict__)) for name, p in model.named_parameters()}
    sch = schedule(model)
    fill(sch)
    with pytest.raises(ScheduleError) as raised:
        megasched.build(sch, **arguments)
    assert dict(model.named_modules()) == before
    assert {name: (id(p), dict(p.__dict__)) for name, p in model.named_parameters()} == parameters
    assert all(p.source in {r.source for r in sch.records} for p in raised.value.problems)
    return raised.value.problems
