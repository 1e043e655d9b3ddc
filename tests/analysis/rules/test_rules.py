"""Every rule is right, for any shape: an operator of the whole is its parts put together, forward and backward."""

import pytest
from hypothesis import given, settings

from megasched.analysis.rules import dims, sequence_dims
from megasched.analysis.rules.dims import follow
from megasched.analysis.rules.sequence_dims import follow_sequence
from tests.analysis.rules.by_parts import check
from tests.analysis.rules.computed import pointwise, pointwise_overloads
from tests.analysis.rules.examples import EXAMPLES, EXAMPLES_OF_SEQUENCES

KNOWN_OF_SEQUENCES = sequence_dims._KNOWN | sequence_dims._SPECIAL.keys() | {"copy_"}
few_and_many = pytest.mark.parametrize("most", [30, pytest.param(500, marks=pytest.mark.slow)])


def proven(strategy, rule, most):
    """How many examples, of so many, the rule gave an answer to that was right."""
    checked = []

    @settings(max_examples=most, derandomize=most < 100)
    @given(strategy)
    def run(example):
        checked.append(check(example, rule))

    run()
    return sum(checked)


@few_and_many
@pytest.mark.parametrize("name", sorted(dims._KNOWN | {"new_zeros", "new_ones", "new_full", "new_empty"}))
def test_a_rule_of_features(name, most):
    assert proven(EXAMPLES[name], follow, most)


@few_and_many
@pytest.mark.parametrize("name", sorted(KNOWN_OF_SEQUENCES))
def test_a_rule_of_a_sequence(name, most):
    forms = (name, f"{name}_")  # in place, too
    examples = [known[form] for known in (EXAMPLES, EXAMPLES_OF_SEQUENCES) for form in forms if form in known]
    assert sum(proven(strategy, follow_sequence, most) for strategy in examples)


@pytest.mark.parametrize("rule", [follow, follow_sequence])
@pytest.mark.parametrize("group", range(4))
def test_whatever_torch_calls_pointwise(rule, group):
    names = list(pointwise_overloads())
    assert len(names) > 300
    for name in names[group::4]:
        assert proven(pointwise(name), rule, 3)


@pytest.mark.slow
@pytest.mark.parametrize("rule", [follow, follow_sequence])
@pytest.mark.parametrize("group", range(16))
def test_many_examples_of_what_torch_calls_pointwise(rule, group):
    for name in list(pointwise_overloads())[group::16]:
        assert proven(pointwise(name), rule, 60)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(EXAMPLES.keys() | EXAMPLES_OF_SEQUENCES.keys()))
@pytest.mark.parametrize("rule", [follow, follow_sequence])
def test_no_answer_is_wrong(rule, name):
    """Of those, too, that there is no rule for."""
    for known in (EXAMPLES, EXAMPLES_OF_SEQUENCES):
        if name in known:
            proven(known[name], rule, 200)
