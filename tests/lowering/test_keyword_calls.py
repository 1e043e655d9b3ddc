"""Modules that the build changes take their argument by name, as torch's and transformers' own do."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
from transformers.pytorch_utils import Conv1D

import megasched
from megasched.verify.ranks.pool import init_megatron
from tests.language.sharding import column_row
from tests.lowering.models import randomize
from tests.lowering.parity import compare, too_far

IDS = torch.arange(12).reshape(2, 6) % 9


class Projection(nn.Linear):
    """Names its argument in its own way."""

    def forward(self, hidden):
        return F.linear(hidden, self.weight, self.bias)


class Scaled(nn.Embedding):
    def forward(self, input):
        return super().forward(input=input) * 2


class Pair(nn.Module):
    def __init__(self, table=nn.Embedding):
        super().__init__()
        self.table = table(9, 8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, ids):
        return self.down(input=torch.tanh(self.up(input=self.table(input=ids))))


class Named(Pair):
    def __init__(self):
        super().__init__(Scaled)
        self.up, self.down = Conv1D(16, 8), Projection(16, 8)

    def forward(self, ids):
        return self.down(hidden=torch.tanh(self.up(x=self.table(input=ids))))


class Gathered(Pair):
    """The column's output is gathered, and the row takes its part of a whole input."""

    def forward(self, ids):
        return self.down(input=self.up(input=self.table(input=ids)).softmax(-1))


class Pictures(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1)

    def forward(self, x):
        return self.down(input=torch.tanh(self.norm(input=self.up(input=x))))


class Block(nn.Module):
    """What levels above ``leaf`` compute by kernels of their own."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(9, 8)
        self.norm = LlamaRMSNorm(8)
        self.mlp = LlamaMLP(LlamaConfig(hidden_size=8, intermediate_size=16, num_attention_heads=2))

    def forward(self, ids):
        return self.mlp(x=self.norm(hidden_states=self.table(input=ids)))


def _all(sch):
    sch["table"].shard("weight", axis=0)
    column_row(sch)


def _adapted(sch):
    _all(sch)
    sch["up"].adapt(rank=2)


def _gated(sch):
    sch["mlp.gate_proj"].shard("weight", axis=0)
    sch["mlp.up_proj"].shard("weight", axis=0)
    sch["mlp.down_proj"].shard("weight", axis=1)


def _compared(tp):
    init_megatron(tp=tp)
    ids, x = {"ids": IDS}, {"x": torch.linspace(-1, 1, 2 * 3 * 25).reshape(2, 3, 5, 5)}
    cases = {
        "pair": (Pair, _all, ids),
        "named": (Named, _all, ids),
        "gathered": (Gathered, _all, ids),
        "pictures": (Pictures, column_row, x),
        "block": (Block, _gated, ids),
    }
    torch.manual_seed(0)
    found = {name: too_far(compare(randomize(make()), fill, x, x)) for name, (make, fill, x) in cases.items()}
    sch = megasched.create_schedule(randomize(Pair()))
    _adapted(sch)
    adapted = megasched.build(sch, inputs=ids)
    adapted(**ids).sum().backward()
    return found, adapted.up.lora_B.weight.grad is not None


@pytest.mark.parametrize("tp", [1, 2])
def test_arguments_by_name(ranks, tp):
    names = ("pair", "named", "gathered", "pictures", "block")
    assert ranks.run(tp, _compared, tp) == [({name: {} for name in names}, True)] * tp


def test_norms_and_activations_in_a_process_without_groups():
    model = randomize(Block())
    want = model(IDS)
    sch = megasched.create_schedule(model)
    sch["mlp"].checkpoint()
    torch.testing.assert_close(megasched.build(sch, inputs={"ids": IDS})(IDS), want, rtol=1e-5, atol=1e-6)
