"""Modules that tests shard, and what can stand between a column and its row."""

import torch
from torch import nn
from torch.nn import functional as F

import megasched
from megasched import ParallelDims
from megasched.plan.make import make_plan
from tests.lowering.models import Mlp


def column_row(sch):
    sch["**.up"].shard("weight", axis=0)
    sch["**.down"].shard("weight", axis=1)


def columns(sch):
    sch["**.up"].shard("weight", axis=0)


def rows(sch):
    sch["**.down"].shard("weight", axis=1)


class Residual(nn.Module):
    """A column's output meets the whole input: [b, s, 8] -> [b, s, 8]."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x):
        return x + torch.tanh(self.up(x))


class Gated(nn.Module):
    """Gate and up packed into one projection."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 2 * 12)
        self.down = nn.Linear(12, 8, bias=False)

    def forward(self, x):
        gate, up = self.up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Uneven(nn.Module):
    """Three projections of different sizes, packed: two features of the first for one of each other."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 4 + 2 + 2)
        self.down = nn.Linear(4, 8)

    def forward(self, x):
        width = self.up.weight.shape[0] // 4
        a, b, c = self.up(x).split([2 * width, width, width], dim=-1)
        return self.down(a * b.repeat_interleave(2, dim=-1) + c.repeat_interleave(2, dim=-1))


class Between(nn.Module):
    """Replicated parameters applied to sharded activations: their gradients are partial."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 4 * 4)
        self.norm = nn.LayerNorm(4)
        self.scale = nn.Parameter(torch.ones(()))
        self.down = nn.Linear(16, 8)

    def forward(self, x):
        heads = self.up(x).unflatten(-1, (-1, 4))
        return self.down((self.scale * self.norm(heads)).flatten(-2))


class Cross(nn.Module):
    """Columns that read two activations, as cross attention does."""

    def __init__(self):
        super().__init__()
        self.up_q, self.up_k, self.up_v = (nn.Linear(8, 16) for _ in range(3))
        self.down = nn.Linear(16, 8)

    def forward(self, x, memory):
        return self.down(self.up_q(x) * torch.tanh(self.up_k(memory)) + self.up_v(memory))


class Encoded(nn.Module):
    def __init__(self):
        super().__init__()
        self.before = nn.Linear(8, 8)
        self.cross = Cross()

    def forward(self, x):
        x = self.before(x)
        return self.cross(x, torch.sin(x))


class Handed(nn.Module):
    """Two columns read the input, and the input goes out beside their product."""

    def __init__(self):
        super().__init__()
        self.up_a, self.up_b = nn.Linear(8, 16), nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x):
        return x, self.down(self.up_a(x) * self.up_b(x))


class Handing(nn.Module):
    def __init__(self):
        super().__init__()
        self.before = nn.Linear(8, 8)
        self.block = Handed()

    def forward(self, x):
        same, new = self.block(self.before(x))
        return same * same + new


class Twice(nn.Module):
    """One column called on two activations."""

    def __init__(self):
        super().__init__()
        self.before = nn.Linear(8, 8)
        self.inner = nn.ModuleDict({"up": nn.Linear(8, 16), "gate": nn.Linear(8, 16), "down": nn.Linear(16, 8)})

    def forward(self, x):
        x = self.before(x)
        up, gate, down = self.inner["up"], self.inner["gate"], self.inner["down"]
        return down(up(x) * up(torch.sin(x)) * gate(x))


class Tied(nn.Module):
    """The head comes first, shares the embedding's weight, and its vocabulary of 9 is padded."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(8, 9)
        self.embed = nn.Embedding(9, 8)
        self.head.weight = self.embed.weight
        self.mlp = Mlp()

    def forward(self, ids):
        return self.head(self.mlp(self.embed(ids)))


class Shared(nn.Module):
    """One module under two names, a second of the same weight and bias."""

    def __init__(self):
        super().__init__()
        self.first = Mlp()
        self.second = nn.ModuleDict({"again": self.first})
        self.third = Mlp()
        self.third.up.weight, self.third.up.bias = self.first.up.weight, self.first.up.bias
        self.third.down.weight = self.first.down.weight

    def forward(self, x):
        return self.third(self.second["again"](self.first(x)))


class Masked(nn.Module):
    """A float mask made of ids alone meets a sharded activation, and does not have it gathered."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(9, 8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, ids):
        mask = (ids > 3).float().unsqueeze(-1)
        return self.down(mask * self.up(self.embed(ids)))


class Chain(nn.Module):
    """A column, something made of its output, a row."""

    def __init__(self, between, width=16, **more):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(width, 8)
        for name, module in more.items():
            self.add_module(name, module)
        self.register_buffer("pattern", torch.linspace(0.5, 1.5, 16))
        self.gamma = nn.Parameter(torch.ones(16))
        self.between = between

    def forward(self, x):
        return self.down(self.between(self, self.up(x)))


# What a part of the features can't tell: the column's output is gathered, whatever it is.
NEED_THE_WHOLE = {
    "layer norm": lambda m, y: F.layer_norm(y, (16,)),
    "rms norm": lambda m, y: m.gamma * y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-3),
    "softmax": lambda m, y: y.softmax(-1),
    "cumulative sum": lambda m, y: y.cumsum(-1),
    "largest": lambda m, y: y / y.amax(-1, keepdim=True).abs(),
    "buffer of all features": lambda m, y: m.pattern * y,
    "parameter of all features": lambda m, y: m.gamma * y,
    "reversed": lambda m, y: y.flip(-1),
    "two halves multiplied": lambda m, y: torch.cat([y.chunk(2, -1)[0] * y.chunk(2, -1)[1], y[..., :8]], -1),
    "every second": lambda m, y: torch.cat([y[..., ::2], y[..., 1::2]], -1),
    "one of them": lambda m, y: y * y[..., 3:4],
    "heads in the other order": lambda m, y: y.unflatten(-1, (-1, 4)).transpose(-1, -2).flatten(-2),
    "norm over the heads": lambda m, y: F.layer_norm(y.unflatten(-1, (-1, 4)), (4, 4)).flatten(-2),
    "whole linear": lambda m, y: m.whole(torch.tanh(y)),
    "product over features": lambda m, y: (y.transpose(1, 2) @ y)[:, :3],
    "one for a whole head of the other operand": lambda m, y: (
        (y.unflatten(-1, (-1, 4)).flatten(0, 1).transpose(0, 1) @ m.gamma.view(4, 4, 1).expand(4, 4, 4))
        .transpose(0, 1)
        .reshape(y.shape)
    ),
    "asked for a number": lambda m, y: y * (2.0 if torch.equal(y, y + 1) else 3.0),
    # Of these nothing is known, so that they are taken for such.
    "sum but for what is no number": lambda m, y: y / y.nansum(-1, keepdim=True),
    "smallest and largest": lambda m, y: y * sum(y.aminmax(dim=-1, keepdim=True)),
    "most frequent": lambda m, y: y - y.mode(-1, keepdim=True).values,
    "median": lambda m, y: y - y.nanmedian(-1, keepdim=True).values,
    "how many": lambda m, y: y * torch.count_nonzero(y > 0, -1)[..., None],
    "distances": lambda m, y: y * torch.cdist(y, y).sum(-1, keepdim=True),
    "sum of exponentials": lambda m, y: y.logcumsumexp(-1),
    "frequencies": lambda m, y: torch.fft.rfft(y).abs().sum(-1, keepdim=True) * y,
    "neighbours": lambda m, y: F.avg_pool1d(y, 3, 1, 1),
    "windows": lambda m, y: y.unfold(-1, 4, 4).amax(-2, keepdim=True).flatten(-2).repeat(1, 1, 4),
    "rescaled": lambda m, y: torch.renorm(y, 2, 0, 1.0),
    # What a rank would read off its part.
    "number of features": lambda m, y: y / y.shape[-1],
    "number of elements": lambda m, y: y * (12.0 / y.numel()),
    "so many groups": lambda m, y: F.normalize(y.view(2, 3, 4, -1), dim=-1).flatten(-2),
    "places counted": lambda m, y: y * torch.arange(y.shape[-1]),
    "as many zeros": lambda m, y: y + torch.zeros(y.shape).fill_(y.shape[-1]),
}
# What can be computed on a part, and stays so.
TAKE_A_PART = {
    "activation": lambda m, y: torch.tanh(y) * 2 + y * y,
    "norm in each head": lambda m, y: F.layer_norm(y.unflatten(-1, (-1, 4)), (4,)).flatten(-2),
    "norm over positions": lambda m, y: y.softmax(1) + y.mean(1, keepdim=True) + y.sum((0, 1)),
    "positions moved": lambda m, y: torch.cat([y[:, 1:], y[:, :1]], 1).flip(1),
    "half of each head turned": lambda m, y: torch.cat(
        [-y.unflatten(-1, (-1, 4))[..., 2:], y.unflatten(-1, (-1, 4))[..., :2]], -1
    ).flatten(-2),
    "attention spelled out": lambda m, y: spelled_out(y.unflatten(-1, (-1, 4)).transpose(1, 2)),
    "flattened and back": lambda m, y: y.reshape(6, -1).view(2, 3, -1).permute(1, 0, 2).transpose(0, 1),
    "matrix of positions": lambda m, y: torch.linspace(0, 1, 9).reshape(1, 3, 3).expand(2, 3, 3) @ y,
}


def spelled_out(q):
    """[b, heads, s, d] attending to itself."""
    return ((q @ q.transpose(-1, -2)).softmax(-1) @ q).transpose(1, 2).flatten(-2)


def tie(sch):
    sch["head"].shard("weight", axis=0)
    sch["embed"].shard("weight", axis=0)
    sch["mlp.up"].shard("weight", axis=0)


class Sliced(nn.Module):
    """A gate that is written into a buffer, slice by slice."""

    def __init__(self):
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(8, 16), nn.Linear(8, 1), nn.Linear(16, 8)

    def forward(self, x):
        gate, out = self.gate(x), torch.zeros(*x.shape[:2], 1)
        out[:, :2], out[:, 2:] = gate[:, :2], gate[:, 2:]
        return self.down(self.up(x) * out)


class Embedded(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.mlp = Mlp()
        self.head = nn.Linear(8, 10)

    def forward(self, ids):
        return self.head(self.mlp(self.embed(ids)))


def shard_all(sch):
    sch["embed"].shard("weight", axis=0)
    sch["mlp.up"].shard("weight", axis=0)
    sch["mlp.down"].shard("weight", axis=1)
    sch["head"].shard("weight", axis=0)


def planned(fill):
    sch = megasched.create_schedule(Embedded(), ParallelDims(tensor_model_parallel_size=2))
    shard_all(sch)
    fill(sch)
    return make_plan(sch, inputs={"ids": torch.zeros(1, 3, dtype=torch.long)})
