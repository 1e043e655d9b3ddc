"""Sharded modules of any ``nn.Module`` at TP 2: what they compute, every gradient, what Megatron reads of them."""

import pytest
import torch
from torch import nn

from megasched.verify.ranks.pool import init_megatron
from tests.language.sharding import (
    NEED_THE_WHOLE,
    TAKE_A_PART,
    Between,
    Chain,
    Encoded,
    Gated,
    Handing,
    Masked,
    Residual,
    Shared,
    Sliced,
    Tied,
    Twice,
    Uneven,
    column_row,
    columns,
    rows,
    tie,
)
from tests.lowering.models import Mlp, randomize
from tests.lowering.parity import compare, scheduled_copy, too_far

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
