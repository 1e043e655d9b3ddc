"""A sample of architectures without a line of code of their own, at layouts that ask the most of each."""

import pytest

from megasched.definition.small_models.small_models import write_small_model
from megasched.model_adapters.registry import has_roles
from megasched.verify.parity import check_layout
from tests.parity.cases import spread
from tests.parity.steps import assert_equal, assert_equal_by_rounding
from tests.verify.sample import SAMPLE

# Model type -> what it is here for, under sequence parallelism.
SPLIT = {
    "ctrl": "attention that gets one tensor as query, key and value",
    "gemma3n_text": "several streams of tokens, [n, b, s, h], that are written to in place",
    "megatron-bert": "attention of its own that reads the length of the sequence off its input",
    "rwkv": "a token sees the one before it, by padding that keeps the shape",
    "zamba2": "every layer reads an activation from before the layers",
}
TWINS = ("deepseek_v3", "mixtral")  # of tests/parity/test_experts.py, whose experts are HF's code, too
LAYOUTS = ("tp2-sp", "pp2-vpp2", "tp2-pp2")


@pytest.fixture(scope="module")
def small(ranks, tmp_path_factory):
    made = {}

    def get(model_type):
        if model_type not in made:
            (made[model_type],) = ranks.run(
                1, write_small_model, model_type, str(tmp_path_factory.mktemp(model_type))
            )
        return made[model_type]

    return get


@pytest.mark.parametrize(("model_type", "layout"), spread(SAMPLE, LAYOUTS, twins=TWINS))
def test_a_step_equals_the_unscheduled_model(ranks, small, model_type, layout):
    assert not has_roles(model_type)
    check_equal(ranks, small(model_type), layout)


@pytest.mark.parametrize("model_type", SPLIT)
def test_a_step_on_split_sequences_equals_the_unscheduled_model(ranks, small, model_type):
    check_equal(ranks, small(model_type), "tp2-sp")


def test_layers_with_tables_of_token_ids_equal_the_unscheduled_model(ranks, small):
    """Qwen4's decays (A_log) have gradients of which rounding takes more than in others, unscheduled, too."""
    outcome = check_layout(ranks, small("qwen4_exp_text"), "tp2-sp")
    assert_equal_by_rounding(outcome)
    assert max(error for name, error in outcome.errors.items() if name != "gradient") < 1e-6


def check_equal(ranks, folder, layout):
    outcome = check_layout(ranks, folder, layout)
    assert_equal(outcome)
    assert outcome.errors.keys() == {"loss", "logits", "gradient", "grad_norm"}
