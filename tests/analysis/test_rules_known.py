"""No architecture of transformers is gathered for want of a rule of an operator."""

from functools import cache

import pytest

from megasched.definition.small_models.small_models import causal_lm_types, small_config
from megasched.language.parallel_dims import ParallelDims
from megasched.plan.decisions import without_rule
from megasched.trainer.session import open_session

# Complex rotary numbers, pads and convolutions between a column and its row.
FAST = ("deepseek_v2", "llama4_text", "qwen3_next", "qwen3_5_text")
# What no run takes, with or without a layout: transformers does not make it, or not from ids.
NOT_RUN = {"blt", "gemma3n", "gemma4_assistant", "gemma4_unified_assistant", "musicgen", "musicgen_melody"}
TYPES = [one for one in causal_lm_types() if one not in NOT_RUN]


@pytest.fixture(scope="module")
def plan_of(tmp_path_factory):
    """Plan of a small model, made when first asked for."""

    @cache
    def made(model_type):
        folder = tmp_path_factory.mktemp(model_type)
        small_config(model_type).save_pretrained(folder)
        return open_session("auto", str(folder), ParallelDims(tensor_model_parallel_size=2)).plan

    return made


@pytest.mark.parametrize(
    "model_type", [*FAST, *(pytest.param(one, marks=pytest.mark.slow) for one in TYPES if one not in FAST)]
)
def test_each_operator_that_meets_a_cut_has_a_rule(model_type, plan_of):
    assert without_rule(plan_of(model_type)) == []


@pytest.mark.parametrize("model_type", ["deepseek_v2", "llama4_text"])
def test_complex_rotary_numbers_leave_attention_cut(model_type, plan_of):
    tp_facts = plan_of(model_type).tp_facts
    assert [path for path in tp_facts.gather if "self_attn" in path] == []
    assert {whole for _, whole in tp_facts.attention.values()} == {True}
