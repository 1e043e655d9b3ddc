"""Where the pipeline is cut."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import DeepseekV3Config, LlamaConfig

from megasched.language.parallel_dims import ParallelDims
from megasched.plan.pipeline import balance, layout_string
from megasched.trainer.session import open_session

LENGTH = 4096
PP4 = ParallelDims(pipeline_model_parallel_size=4)


def opened(folder, config):
    config.save_pretrained(folder)
    return open_session("auto", str(folder), PP4)


def brute_force(costs, first, last, stages):
    """Dearest stage of the best of all cuts."""
    count = len(costs)
    found = []
    for ends in combinations(range(1, count), stages - 1):
        bounds = [0, *ends, count]
        sums = [sum(costs[a:b]) for a, b in pairwise(bounds)]
        sums[0] += first
        sums[-1] += last
        found.append(max(sums))
    return min(found)


@given(
    st.lists(st.integers(1, 20).map(float), min_size=1, max_size=8),
    st.integers(0, 30).map(float),
    st.integers(0, 30).map(float),
    st.data(),
)
def test_balance_is_the_best_of_all_cuts(costs, first, last, data):
    stages = data.draw(st.integers(1, len(costs)))
    layers = balance(costs, first, last, stages)
    assert sum(layers) == len(costs)
    assert min(layers) >= 1
    bounds = [sum(layers[:i]) for i in range(stages + 1)]
    sums = [sum(costs[a:b]) for a, b in pairwise(bounds)]
    sums[0] += first
    sums[-1] += last
    assert max(sums) == brute_force(costs, first, last, stages)


def test_equal_layers_without_a_head_are_cut_evenly():
    assert balance([1.0] * 12, 0.0, 0.0, 4) == [3, 3, 3, 3]


def test_a_dear_head_takes_layers_off_the_last_stage():
    assert balance([1.0] * 8, 0.0, 2.0, 2) == [5, 3]


def test_layout_string_is_megatrons():
    from megatron.core.transformer.enums import LayerType
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    text = layout_string([2, 1, 3, 2])
    assert text == "Ett|t|ttt|ttL"
    layout = PipelineParallelLayerLayout(text, 2)
    layout.validate_layer_layout(8, None)
    # rank 0 holds chunks 0 and 2, rank 1 holds 1 and 3
    assert [len(chunk) for chunk in layout.layout[0]] == [3, 3]
    assert layout.layout[1][1][-1] == LayerType.loss


@pytest.mark.parametrize(("vocab_size", "cut"), [(32000, [4, 4, 4, 4]), (129280, [5, 4, 4, 3])])
def test_an_expert_counts_for_the_tokens_that_it_gets(tmp_path, vocab_size, cut):
    """DeepSeek-V3's sizes: 8 of 256 experts and a shared one are as wide as the MLP of its dense layers, which are
    the first four of sixteen here. Its own head is as dear as 1.4 layers."""
    config = DeepseekV3Config(num_hidden_layers=16, first_k_dense_replace=4, vocab_size=vocab_size)
    session = opened(tmp_path, config)
    layers, before, after = session.layer_costs(LENGTH)
    hidden, heads, width = config.hidden_size, config.num_attention_heads, config.moe_intermediate_size
    q, kv, nope, rope, value = (
        getattr(config, name)
        for name in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    )
    attention = hidden * (q + kv + rope) + heads * (q * (nope + rope) + kv * (nope + value) + hidden * value)
    scores = (LENGTH + 1) * heads * (nope + rope + value)
    dense = 2 * (attention + 3 * hidden * config.intermediate_size) + scores
    mixture = 2 * (attention + 3 * hidden * width * (8 + 1) + hidden * 256) + scores
    assert layers == [dense] * 4 + [mixture] * 12
    assert (before, after) == (0, 2 * hidden * vocab_size)
    assert session.stage_layers(LENGTH) == cut == balance(layers, before, after, 4)


def test_costs_of_a_dense_model_are_its_matrices_and_causal_attention(tmp_path):
    """A token attends to (s + 1) / 2 keys."""
    config = LlamaConfig(hidden_size=512, intermediate_size=1024, num_hidden_layers=8, num_key_value_heads=4)
    session = opened(tmp_path, config)
    layers, before, after = session.layer_costs(LENGTH)
    hidden, width = config.hidden_size, config.hidden_size // config.num_attention_heads
    linears = hidden * width * (2 * config.num_attention_heads + 2 * 4) + 3 * hidden * 1024
    assert layers == [2 * linears + 2 * (LENGTH + 1) * hidden] * 8
    assert (before, after) == (0, 2 * hidden * config.vocab_size)
