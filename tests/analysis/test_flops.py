"""FLOPs counted on definitions, against formulas written out by hand."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from megasched.analysis.attention_flops import attended
from megasched.analysis.flops import forward_flops
from megasched.analysis.recording.meta_call import meta_copy, token_inputs
from megasched.analysis.recording.recorder import record_tape
from megasched.definition.build import build_definition
from megasched.definition.small_models.small_models import small_config
from megasched.layers import attention

BATCH, LENGTH = 2, 24


LAYERS = tuple(f"model.layers.{index}" for index in range(4))


def counted(model_type, paths=LAYERS, **changes):
    config = small_config(model_type)
    for name, value in changes.items():
        setattr(config, name, value)
    model = build_definition(config)
    attention.enable(model)
    inputs = {"input_ids": token_inputs(BATCH, LENGTH)["input_ids"]}
    return config, forward_flops(record_tape(meta_copy(model), inputs), paths)


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


@pytest.mark.parametrize(("model_type", "window"), [("llama", None), ("mistral", 8)])
def test_layers_and_head_are_what_the_formula_says(model_type, window):
    config, flops = counted(model_type)
    assert flops.layers == [by_hand(config, window)] * 4
    assert flops.after == 2 * BATCH * LENGTH * config.hidden_size * config.vocab_size
    assert flops.before == 0
    assert flops.total == 4 * by_hand(config, window) + flops.after


def test_layers_with_windows_of_their_own_are_told_apart():
    config, flops = counted("gemma2")
    kinds = [8 if kind == "sliding_attention" else None for kind in config.layer_types]
    assert set(kinds) == {8, None}
    assert flops.layers == [by_hand(config, window) for window in kinds]


def test_a_token_counts_the_experts_that_it_is_routed_to():
    config, flops = counted("mixtral", num_local_experts=4, num_experts_per_tok=2)
    routed = 2 * 3 * config.hidden_size * config.intermediate_size + config.hidden_size * 4
    assert flops.layers[0] == by_hand(config, mlp=routed)


def test_batched_experts_count_the_tokens_that_they_are_chosen_for():
    """Llama 4's get all tokens, most of them as zeros; with more experts the router alone has more to compute."""
    (config, four), (_, eight) = (counted("llama4_text", num_local_experts=count) for count in (4, 8))
    routers = 2 * BATCH * LENGTH * 4 * config.hidden_size
    assert [b - a for a, b in zip(four.layers, eight.layers, strict=True)] == [routers] * 4
    (_, two) = counted("llama4_text", num_local_experts=4, num_experts_per_tok=2)
    one_more = 2 * BATCH * LENGTH * 3 * config.hidden_size * config.intermediate_size
    assert [b - a for a, b in zip(four.layers, two.layers, strict=True)] == [one_more] * 4


def test_what_runs_between_two_parts_counts_for_the_later_one():
    """Of a Llama's second and fourth layer, the third one's work counts for the fourth."""
    config, flops = counted("llama", LAYERS[1::2])
    layer = by_hand(config)
    assert (flops.before, flops.layers) == (layer, [layer, 2 * layer])


def test_a_state_space_layer_counts_its_products_and_convolution():
    mixer = "backbone.layers.0.mixer"
    config, flops = counted("mamba", (f"{mixer}.in_proj", f"{mixer}.out_proj"))
    inner, hidden, states, rank = (
        getattr(config, name) for name in ("intermediate_size", "hidden_size", "state_size", "time_step_rank")
    )
    first, rest = (count / (2 * BATCH * LENGTH) for count in flops.layers)
    assert first == hidden * 2 * inner
    scanned = inner * (rank + 2 * states) + rank * inner
    assert rest >= inner * config.conv_kernel + scanned + inner * hidden
