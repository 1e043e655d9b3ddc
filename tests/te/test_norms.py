"""Norms whose weight is added to 1, by Transformer Engine's module, at level ``fused``: numbers and gradients."""

import pytest

from tests.process import TE, run_case

# How many of a model's norms are by Transformer Engine: all of Gemma's, those of hidden states in
# Qwen3-Next, and none of Llama's, which are torch's.
FAMILIES = {"gemma2": 9, "qwen3_next": 5, "llama": 0}


@pytest.fixture(scope="module")
def found():
    return run_case(TE, "tests.te.norms_case", *FAMILIES)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_it_computes_is_what_the_definition_does(found, family):
    case = found[family]
    assert case["calls"] == FAMILIES[family]
    assert case["logits"] < 1e-6
    assert case["gradients"] < 1e-5
    assert case["same parameters"]
