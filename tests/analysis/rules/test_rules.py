"""Every rule is right, for any shape: an operator of the whole is its parts put together, forward and backward."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings

from megasched.analysis.rules.follow import follow
from megasched.analysis.rules.table import IN_PLACE, RULES
from tests.analysis.rules.by_parts import check
from tests.analysis.rules.computed import pointwise, pointwise_overloads
from tests.analysis.rules.examples import EXAMPLES

few_and_many = pytest.mark.parametrize("most", [30, pytest.param(500, marks=pytest.mark.slow)])


def written(op):
    """The overload of an operator that writes to its operand; None where there is none."""
    packet = getattr(torch.ops.aten, f"{op.overloadpacket.__name__}_", None)
    return getattr(packet, op._overloadname, None) if packet is not None else None


def proven(strategy, most, *, in_place=False):
    """How many examples, of so many, the rule gave an answer to that was right."""
    checked = []

    @settings(max_examples=most, derandomize=most < 100)
    @given(strategy)
    def run(example):
        op = written(example.op) if in_place else example.op
        checked.append(op is not None and check(replace(example, op=op)))

    run()
    return sum(checked)


@few_and_many
@pytest.mark.parametrize("name", sorted(RULES))
def test_a_rule(name, most):
    for strategy in EXAMPLES[name]:
        assert proven(strategy, most)


@few_and_many
@pytest.mark.parametrize(
    "name", sorted(name for name in IN_PLACE if hasattr(torch.ops.aten, f"{name}_") and f"{name}_" not in RULES)
)
def test_a_rule_in_place(name, most):
    assert sum(proven(strategy, most, in_place=True) for strategy in EXAMPLES[name])


@pytest.mark.parametrize("group", range(4))
def test_whatever_torch_calls_pointwise(group):
    names = list(pointwise_overloads())
    assert len(names) > 300
    for name in names[group::4]:
        assert proven(pointwise(name), 3)


@pytest.mark.slow
@pytest.mark.parametrize("group", range(16))
def test_many_examples_of_what_torch_calls_pointwise(group):
    for name in list(pointwise_overloads())[group::16]:
        assert proven(pointwise(name), 60)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_no_answer_is_wrong(name):
    """Of those, too, that there is no rule for."""
    for strategy in EXAMPLES[name]:
        proven(strategy, 200)


def test_an_operator_of_others_has_no_rule_by_its_name():
    calls = []
    with torch.library._scoped_library("test_rules", "FRAGMENT") as library:
        library.define("flip(Tensor self, int[] dims) -> Tensor")
        library.impl("flip", lambda x, dims: calls.append(x) or x.sum() * x, "CPU")
        from megasched.analysis.rules.op_call import NoRule
        from megasched.language.tensor_types import ShardDim

        x = torch.ones(2, 4)
        op = torch.ops.test_rules.flip.default
        with pytest.raises(NoRule):
            follow(op, (x, [0]), {}, [op(x, [0])], lambda tensor: ShardDim(1))
