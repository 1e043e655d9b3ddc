"""Attention by Transformer Engine's real module with its own plain operations, and what stays with torch."""

import pytest

from tests.process import TE, run_case

CAUSAL, FULL, WINDOW = [-1, 0], [-1, -1], [2, 0]  # HF's window of 3 counts the token itself

TAKEN = {
    "causal": [CAUSAL, "vanilla", 0.0, 2],
    "scaled": [CAUSAL, "vanilla", 0.0, 2],
    "bidirectional": [FULL, "vanilla", 0.0, 2],
    "window": [WINDOW, "vanilla", 0.0, 2],
    "window longer than the sequence": [CAUSAL, "vanilla", 0.0, 2],
    "softcap": [CAUSAL, "vanilla", 2.0, 2],
    "softcap in a window": [WINDOW, "vanilla", 2.0, 2],
    "sinks": [CAUSAL, "learnable", 0.0, 2],
    "sinks in a window": [WINDOW, "learnable", 0.0, 2],
}
LEFT = {
    "other mask": "a mask that is neither causal nor a sliding window",
    "position bias": "a bias on the logits",
    "softcap and dropout": "soft-capped logits with dropout",
    "softcap and sinks": "soft-capped logits with sinks",
    "softcap without flash-attn": "soft-capped logits, for which Transformer Engine needs flash-attn 2.6",
}


@pytest.fixture(scope="module")
def found():
    return run_case(TE, "tests.te.attention_case")


@pytest.mark.parametrize("case", TAKEN)
def test_what_transformer_engine_is_given_it_computes_as_torch_does(found, case):
    """Output, and gradients of q, k, v and sinks."""
    assert found[case]["made"] == [TAKEN[case]]
    assert found[case]["reasons"] == []
    assert found[case]["distance"] < 1e-6


@pytest.mark.parametrize("case", LEFT)
def test_what_it_has_not_stays_with_torch_and_says_why(found, case):
    assert found[case]["made"] == []
    assert found[case]["reasons"] == [LEFT[case]]
    assert found[case]["distance"] == 0


def test_transformer_engine_sees_how_queries_keys_and_values_lie(found):
    """Its own guess, by strides, offsets and storages, of what its kernels are given; one head a rank included."""
    assert len(found["memory"]) == 25
    # Thirds of one tensor are read in place.
    thirds = {"packed, 1 of 1 heads, 1 rows", "packed, 2 of 2 heads, 2 rows"}
    for name in found["memory"]:
        case, layout = found[name], "bs3hd" if name in thirds else "bshd_bshd_bshd"
        assert (case["layouts"], case["reasons"]) == ([layout], [])
        assert case["distance"] < 1e-6


def test_sinks_are_the_definitions_own_parameter(found):
    assert found["sinks"]["parameters"] == ["sinks"]


def test_soft_caps_need_a_kernel_that_is_not_installed_here(found):
    assert found["a kernel for soft caps"] is False
