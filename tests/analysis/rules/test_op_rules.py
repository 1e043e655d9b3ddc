"""Operators of third parties: whole without a rule, which is told; part by part with one."""

import pytest
import torch
from torch import nn

import megasched
from megasched.analysis.rules import op_rules
from megasched.analysis.rules.follow import follow
from megasched.analysis.rules.op_call import NeedsWhole
from megasched.errors import ConfigError
from megasched.language.parallel_dims import ParallelDims
from megasched.language.tensor_types import ShardDim
from megasched.plan.decisions import without_rule
from megasched.plan.make import make_plan

OPERATOR = "test_op_rules::scale"


@torch.library.custom_op(OPERATOR, mutates_args=())
def scale(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * weight


@scale.register_fake
def _(x, weight):
    return torch.empty_like(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(8, 16), "down": nn.Linear(16, 8)}) for _ in "ab"
        )
        self.register_buffer("factor", torch.ones(1))

    def forward(self, x):
        for layer in self.layers:
            x = layer["down"](scale(layer["up"](x), self.factor))
        return x


def planned():
    sch = megasched.create_schedule(Model(), ParallelDims(tensor_model_parallel_size=2))
    sch["layers.*.up"].shard("weight", axis=0)
    sch["layers.*.down"].shard("weight", axis=1)
    return make_plan(sch, inputs={"x": torch.zeros(2, 3, 8, device="meta")})


def of_elements(cut, arguments):
    """Each element by itself, if the factor is one number."""
    return cut.get("x") if arguments["weight"].numel() == 1 else None


@pytest.fixture
def registered(monkeypatch):
    monkeypatch.setattr(op_rules, "_REGISTERED", {})
    return megasched.register_op_rule(torch.ops.test_op_rules.scale.default)


def test_without_a_rule_it_is_handed_whole_tensors_and_that_is_told(monkeypatch):
    monkeypatch.setattr(op_rules, "_REGISTERED", {})
    plan = planned()
    assert plan.tp_facts.gather.keys() == {"layers.0.up", "layers.1.up"}
    (line,) = without_rule(plan)
    assert line.startswith("test_op_rules.scale.default has no rule")
    assert "register_op_rule(torch.ops.test_op_rules.scale.default)" in line


def test_with_a_rule_it_stays_cut(registered):
    registered(of_elements)
    plan = planned()
    assert not plan.tp_facts.gather
    assert without_rule(plan) == []


def answer(along, *shapes):
    tensors = [torch.empty(shape, device="meta") for shape in shapes]
    cuts = dict(zip(map(id, tensors), along, strict=True))
    op = torch.ops.test_op_rules.scale.default
    return follow(op, tuple(tensors), {}, [torch.empty(shapes[0], device="meta")], lambda t: cuts.get(id(t)))


def test_what_a_rule_says_counts(registered):
    registered(of_elements)
    packed = ShardDim(2, components=(4, 4))
    assert answer([packed, None], (2, 3, 8), (1,)) == [packed]
    with pytest.raises(NeedsWhole):
        answer([packed, None], (2, 3, 8), (8,))
    with pytest.raises(NeedsWhole):  # they are cut in two ways
        answer([packed, ShardDim(0)], (2, 3, 8), (8,))


def test_one_operator_has_one_rule(registered):
    registered(of_elements)
    registered(of_elements)
    with pytest.raises(ConfigError, match="registered already"):
        registered(lambda cut, arguments: None)
    with pytest.raises(ConfigError, match="no overload"):
        megasched.register_op_rule(torch.sin)
