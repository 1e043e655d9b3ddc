"""Sharded modules of any ``nn.Module`` at TP 2: what they compute, every gradient, what Megatron reads of them."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from megasched.verify.ranks.pool import init_megatron
from tests.lowering.models import Mlp, randomize
from tests.lowering.parity import compare, scheduled_copy, too_far


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


CASES = {
    # name: (model, schedule, input, whether example inputs are given)
    "pair": (Mlp, column_row, "x", True),
    "pair without inputs": (Mlp, column_row, "x", False),
    "pair without biases": (lambda: Mlp(bias=False), column_row, "x", True),
    "column alone": (Mlp, columns, "x", True),
    "row alone": (Mlp, rows, "x", True),
    "column, gathered as the user says": (
        Mlp,
        lambda sch: sch["up"].shard("weight", axis=0).sync("fwd_post", "all_gather"),
        "x",
        False,
    ),
    "row, cut as the user says": (
        Mlp,
        lambda sch: sch["down"].shard("weight", axis=1).sync("fwd_pre", "scatter"),
        "x",
        False,
    ),
    "column meets the residual": (Residual, columns, "x", True),
    "components": (
        Gated,
        lambda sch: [sch["up"].shard("weight", axis=0, components=(12, 12)), rows(sch)],
        "x",
        True,
    ),
    "uneven components": (
        Uneven,
        lambda sch: [sch["up"].shard("weight", axis=0, components=(4, 2, 2)), rows(sch)],
        "x",
        True,
    ),
    "parameters between": (Between, column_row, "x", True),
    "gate written slice by slice": (Sliced, column_row, "x", True),
    "two activations": (Encoded, lambda sch: [sch["cross.up_*"].shard("weight", axis=0), rows(sch)], "x", True),
    "input handed out": (Handing, lambda sch: [sch["block.up_*"].shard("weight", axis=0), rows(sch)], "x", True),
    "column called twice": (
        Twice,
        lambda sch: [sch["inner.up"].shard("weight", 0), sch["inner.gate"].shard("weight", 0), rows(sch)],
        "x",
        True,
    ),
    "ties": (Tied, tie, "ids", True),
    "shared modules": (Shared, column_row, "x", True),
    "mask of ids": (Masked, column_row, "ids", True),
}


def _inputs(kind):
    if kind == "ids":
        return torch.arange(9).reshape(1, 9)
    return torch.linspace(-1, 1, 2 * 3 * 8).reshape(2, 3, 8)


def _compare_cases(tp):
    init_megatron(tp=tp)
    found = {}
    for name, (make, fill, kind, given) in CASES.items():
        model = randomize(make())
        calls = {"ids" if kind == "ids" else "x": _inputs(kind)}
        found[name] = too_far(compare(model, fill, calls, calls if given else None))
    return found


def _compare_chains():
    """Gaps, and whether the column is gathered, for each thing that can stand between a pair."""
    init_megatron(tp=2)
    found = {}
    x = {"x": _inputs("x")}
    for name, between in (NEED_THE_WHOLE | TAKE_A_PART).items():
        model = Chain(between, width=16, **({"whole": nn.Linear(16, 16)} if name == "whole linear" else {}))
        _, plan, _ = scheduled_copy(randomize(model), column_row, x)
        gathered = plan.tp_facts.gather.keys() == {"up"} and plan.tp_facts.scatter == {"down"}
        cut = not plan.tp_facts.gather and not plan.tp_facts.scatter
        kind = "gathered" if gathered else "cut" if cut else "neither"
        found[name] = (kind, too_far(compare(model, column_row, x, x)))
    return found


def test_what_needs_the_whole_gets_it_and_what_does_not_stays_cut(ranks):
    want = {**{n: ("gathered", {}) for n in NEED_THE_WHOLE}, **{n: ("cut", {}) for n in TAKE_A_PART}}
    for found in ranks.run(2, _compare_chains):
        assert found == want


def _packed_and_gathered():
    """Components that the model then does not keep apart: the whole comes back in its own order."""
    init_megatron(tp=2)
    x = {"x": _inputs("x")}
    found = {}
    for name, between in {
        "not kept apart": lambda m, y: torch.tanh(y),
        "cut elsewhere": lambda m, y: torch.cat([y[..., :4] * y[..., 4:8], y[..., 4:]], -1),
    }.items():
        fill = lambda sch: [sch["up"].shard("weight", 0, components=(8, 8)), rows(sch)]  # noqa: E731
        model = randomize(Chain(between))
        _, plan, _ = scheduled_copy(model, fill, x)
        found[name] = (plan.placement("up", "weight").components, too_far(compare(model, fill, x, x)))
    return found


def test_components_that_are_gathered_are_not_cut_one_by_one(ranks):
    for found in ranks.run(2, _packed_and_gathered):
        assert found == {"not kept apart": ((), {}), "cut elsewhere": ((), {})}


def test_output_and_every_gradient_equal_the_unscheduled_models(ranks):
    for found in ranks.run(2, _compare_cases, 2):
        assert found == {name: {} for name in CASES}


class Packed(nn.Module):
    def __init__(self):
        from transformers.pytorch_utils import Conv1D

        super().__init__()
        self.up, self.down = Conv1D(3 * 8, 8), Conv1D(8, 8)

    def forward(self, x):
        q, k, v = self.up(x).chunk(3, dim=-1)
        return self.down(q * k + v)


def _what_megatron_reads():
    init_megatron(tp=2)
    rank = torch.distributed.get_rank()
    x = _inputs("x")
    found = {}
    model = randomize(Between())
    built, _, _ = scheduled_copy(model, column_row, {"x": x})
    found["classes"] = [type(m).__mro__[1].__name__ for m in (built.up, built.down)]
    found["pieces"] = all(
        torch.equal(piece, whole)
        for piece, whole in (
            (built.up.weight, model.up.weight[8 * rank : 8 * (rank + 1)]),
            (built.up.bias, model.up.bias[8 * rank : 8 * (rank + 1)]),
            (built.down.weight, model.down.weight[:, 8 * rank : 8 * (rank + 1)]),
            (built.down.bias, model.down.bias),
            (built.norm.weight, model.norm.weight),
        )
    )
    packed = randomize(Packed())
    conv, plan, _ = scheduled_copy(
        packed,
        lambda sch: [sch["up"].shard("weight", axis=1, components=(8, 8, 8)), sch["down"].shard("weight", axis=0)],
        {"x": x},
    )
    found["conv1d"] = all(
        torch.equal(m.weight, plan.placement(name, "weight").shard(getattr(packed, name).weight, rank, 2))
        for name, m in conv.named_children()
    ) and [tuple(m.weight.shape) for m in conv.children()]
    tied, _, _ = scheduled_copy(randomize(Tied()), tie, {"ids": _inputs("ids")})
    found["tie"] = tied.head.weight is tied.embed.weight
    found["padded"] = (tied.head.weight.shape[0], tied.head.bias.shape[0], tied(_inputs("ids")).shape[-1])
    found["attributes"] = {
        name: (getattr(p, "tensor_model_parallel", False), getattr(p, "partition_dim", -1))
        for name, p in [*built.named_parameters(), *conv.named_parameters(), *tied.named_parameters()]
    }
    shared, _, _ = scheduled_copy(randomize(Shared()), column_row, {"x": x})
    found["shared"] = shared.second["again"].up is shared.first.up and shared.third.up.bias is shared.first.up.bias
    return found


def test_classes_pieces_ties_and_attributes(ranks):
    whole, rows_, cols = (False, -1), (True, 1), (True, 0)
    for found in ranks.run(2, _what_megatron_reads):
        assert found["classes"] == ["ColumnParallelLinear", "RowParallelLinear"]
        assert found["pieces"] is True
        assert found["conv1d"] == [(12, 8), (8, 4)]
        assert found["tie"] is True
        assert found["padded"] == (5, 5, 9)
        assert found["shared"] is True
        expected = {
            "up.weight": cols,
            "up.bias": cols,
            "norm.weight": whole,
            "norm.bias": whole,
            "scale": whole,
            "down.weight": rows_,
            "down.bias": whole,
            "head.weight": cols,
            "head.bias": cols,
            "mlp.up.weight": cols,
            "mlp.up.bias": cols,
            "mlp.down.weight": whole,
            "mlp.down.bias": whole,
        }
        assert found["attributes"] == expected


def _at_one_rank(with_groups):
    if with_groups:
        init_megatron(tp=1)
    found = {}
    for name, (make, fill, kind, given) in CASES.items():
        model = randomize(make())
        x = {"ids" if kind == "ids" else "x": _inputs(kind)}
        built, _, _ = scheduled_copy(model, fill, x if given else None)
        found[name] = torch.allclose(built(**x), model(**x), rtol=1e-6)
    return found


@pytest.mark.parametrize("with_groups", [True, False])
def test_one_rank_needs_no_groups(ranks, with_groups):
    assert ranks.run(1, _at_one_rank, with_groups) == [dict.fromkeys(CASES, True)]
