"""A config with changed fields, which plain HF trains, gives the same step under a schedule, or is refused."""

from __future__ import annotations

import pytest

from tests.fuzz.run_configs import assert_fine, outcomes

pytestmark = pytest.mark.slow

TYPES = (
    *("afmoe", "bamba", "bloom", "cohere2", "dbrx", "deepseek_v2", "deepseek_v3", "diffllama", "falcon", "gemma2"),
    *("gemma3n_text", "glm4_moe", "gpt2", "gpt_neox", "gpt_oss", "granitemoe", "jamba", "laguna", "llama"),
    *("llama4_text", "mixtral", "mllama", "olmo2", "opt", "phi3", "qwen2_moe", "qwen3", "qwen3_next", "xlnet"),
    "zamba2",
)


@pytest.mark.parametrize("model_type", TYPES)
def test_a_step_is_equal_or_refused(ranks, model_type):
    assert_fine(outcomes, ranks, model_type, 2)
