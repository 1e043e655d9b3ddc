"""Which instances count as linears and as embeddings that can be cut: those that compute nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers.models.falcon.modeling_falcon import FalconLinear
from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding
from transformers.pytorch_utils import Conv1D

from megasched.definition.embeddings import looks_up
from megasched.definition.linears import is_linear


def _name(module):
    return type(module).__name__


class FakeQuantized(nn.Linear):
    """Quantizes only where an instance is told to, as layers for quantization-aware training do."""

    bits: int | None = None

    def forward(self, x):
        weight = self.weight
        if self.bits:
            step = weight.abs().amax(1, keepdim=True) / (2 ** (self.bits - 1) - 1)
            weight = weight + ((weight / step).round() * step - weight).detach()
        return F.linear(x, weight, self.bias)


class Clamped(nn.Linear):
    """Only large values show it."""

    def forward(self, x):
        return super().forward(x).clamp(-1e3, 1e3)


class InTraining(nn.Linear):
    def forward(self, x):
        return super().forward(x) * (0.5 if self.training else 1.0)


class Detached(nn.Linear):
    """Right forward, another backward."""

    def forward(self, x):
        return F.linear(x.detach(), self.weight, self.bias)


class StraightBias(nn.Linear):
    """A bias that is not trained."""

    def forward(self, x):
        return F.linear(x, self.weight, self.bias.detach())


class OfManyTokens(nn.Linear):
    def forward(self, x):
        return super().forward(x) * (1.5 if x.dim() == 3 and x.shape[1] > 20 else 1.0)


class OfTwoDimensions(nn.Linear):
    """It takes no other input."""

    def forward(self, x):
        rows, _ = x.shape
        return super().forward(x).view(rows, -1)


def quantized(bits):
    made = FakeQuantized(4, 4)
    made.bits = bits
    return made


def with_buffer():
    made = nn.Linear(4, 4)
    made.register_buffer("mask", torch.ones(4, 4))
    return made


def with_forward():
    made = nn.Linear(4, 4)
    made.forward = lambda x: F.linear(x, made.weight)
    return made


def on_meta(cls):
    with torch.device("meta"):
        return cls(6, 3)


LINEARS = [nn.Linear(3, 4), nn.Linear(3, 4, bias=False), Conv1D(4, 3), FalconLinear(3, 4), on_meta(FalconLinear)]
LINEARS += [OfTwoDimensions(3, 4)]
OTHERS = [
    *(Clamped(4, 4), InTraining(4, 4), Detached(4, 4), StraightBias(4, 4), quantized(4), with_buffer()),
    OfManyTokens(4, 4),
    *(with_forward(), nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)), nn.Bilinear(3, 3, 3), nn.Identity()),
]


@pytest.mark.parametrize("module", [*LINEARS, quantized(None)], ids=_name)
def test_linears(module):
    assert is_linear(module)
    assert is_linear(module.eval())


@pytest.mark.parametrize("module", OTHERS, ids=_name)
def test_what_computes_or_holds_more_is_none(module):
    assert not is_linear(module)


def test_a_trial_leaves_the_instance_and_the_random_state_alone():
    module = quantized(4)
    weight, state = module.weight.clone(), torch.get_rng_state()
    is_linear(module)
    assert module.training
    assert torch.equal(module.weight, weight)
    assert module.weight.grad is None
    assert torch.equal(torch.get_rng_state(), state)


class LessItsMean(nn.Embedding):
    def forward(self, ids):
        return super().forward(ids) - self.weight.mean(0)


class ByHand(nn.Embedding):
    def forward(self, ids):
        return F.embedding(ids, self.weight)


class Normed(nn.Embedding):
    """A module of its own for what is looked up."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.norm = nn.LayerNorm(self.embedding_dim)

    def forward(self, ids):
        return self.norm(super().forward(ids))


TABLES = [nn.Embedding(5, 4), nn.Embedding(5, 4, padding_idx=1), Normed(5, 4)]


@pytest.mark.parametrize("module", [*TABLES, Gemma3TextScaledWordEmbedding(5, 4, 0)], ids=_name)
def test_tables_that_are_only_looked_up_in(module):
    assert looks_up(module)


OTHER_TABLES = [
    *(LessItsMean(5, 4), ByHand(5, 4), nn.Embedding(5, 4, max_norm=1.0), nn.Embedding(5, 4, sparse=True)),
    *(nn.Embedding(5, 4, scale_grad_by_freq=True), nn.EmbeddingBag(5, 4)),
]


@pytest.mark.parametrize("module", OTHER_TABLES, ids=_name)
def test_what_does_more_with_its_table_is_not_cut(module):
    assert not looks_up(module)
