"""FLOPs counted on definitions, against formulas written out by hand."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from megasched.definition import build_definition
from megasched.lowering import attention_switch
from megasched.lowering.flops import attended, forward_flops
from megasched.trial.meta_call import token_inputs
from megasched.verify.small_models import small_config

BATCH, LENGTH = 2, 24


def counted(model_type, **changes):
    config = small_config(model_type)
    for name, value in changes.items():
        setattr(config, name, value)
    model = build_definition(config)
    attention_switch.switch_on(model)
    return config, forward_flops(model, {"input_ids": token_inputs(BATCH, LENGTH)["input_ids"]})


def pairs(window=None):
    return sum(min(place + 1, window or LENGTH) for place in range(LENGTH))


@given(st.integers(1, 20), st.integers(0, 20), st.booleans(), st.none() | st.integers(1, 30))
def test_pairs_of_queries_and_keys_are_counted_one_by_one(queries, more, causal, window):
    keys = queries + more
    by_hand = 0
    for query in range(queries):
        place = more + query
        seen = range(place + 1) if causal else range(keys)
        by_hand += sum(1 for key in seen if not causal or window is None or key > place - window)
    assert attended(queries, keys, causal, window) == by_hand


def by_hand(config, window=None, mlp=None):
    """One layer of a Llama: its linears, and scores and values of attention."""
    hidden, heads = config.hidden_size, config.num_attention_heads
    width = config.head_dim or hidden // heads
    linears = hidden * width * (2 * heads + 2 * config.num_key_value_heads)
    linears += 3 * hidden * config.intermediate_size if mlp is None else mlp
    return BATCH * (2 * LENGTH * linears + 2 * heads * pairs(window) * 2 * width)


def of_layer(flops, index):
    return sum(count for path, count in flops.items() if path.startswith(f"model.layers.{index}."))


@pytest.mark.parametrize(("model_type", "window"), [("llama", None), ("mistral", 8)])
def test_layers_and_head_are_what_the_formula_says(model_type, window):
    config, flops = counted(model_type)
    assert [of_layer(flops, index) for index in range(4)] == [by_hand(config, window)] * 4
    assert flops["lm_head"] == 2 * BATCH * LENGTH * config.hidden_size * config.vocab_size
    assert sum(flops.values()) - flops["lm_head"] - 4 * by_hand(config, window) < 1e-3 * sum(flops.values())


def test_layers_with_windows_of_their_own_are_told_apart():
    config, flops = counted("gemma2")
    kinds = [8 if kind == "sliding_attention" else None for kind in config.layer_types]
    assert set(kinds) == {8, None}
    assert [of_layer(flops, index) for index in range(4)] == [by_hand(config, window) for window in kinds]


def test_a_token_counts_the_experts_that_it_is_routed_to():
    config, flops = counted("mixtral", num_local_experts=4, num_experts_per_tok=2)
    routed = 2 * 3 * config.hidden_size * config.intermediate_size + config.hidden_size * 4
    assert of_layer(flops, 0) == by_hand(config, mlp=routed)


def test_a_state_space_layer_counts_its_products_and_convolution():
    config, flops = counted("mamba")
    inner, hidden = config.intermediate_size, config.hidden_size
    assert flops["backbone.layers.0.mixer.in_proj"] == 2 * BATCH * LENGTH * hidden * 2 * inner
    assert flops["backbone.layers.0.mixer.out_proj"] == 2 * BATCH * LENGTH * inner * hidden
    convolution = 2 * BATCH * LENGTH * inner * config.conv_kernel
    assert sum(flops.get(f"backbone.layers.0.mixer{part}", 0) for part in ("", ".conv1d")) >= convolution
