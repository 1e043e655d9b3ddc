"""Rotary functions that an attention module finds in its file, replaced for one instance alone."""

import functools
import inspect

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.llama import modeling_llama

from megasched.definition.small_models.small_models import small_config
from megasched.layers.fused import rotary
from tests import tiny


def _counted(monkeypatch):
    calls = []

    def one_kernel(function):
        def counted(*args, **kwargs):
            calls.append(function.__name__)
            return function(*args, **kwargs)

        return counted

    monkeypatch.setattr(rotary, "one_kernel", one_kernel)
    return calls


# Whole, partial and interleaved embeddings, and functions of other names.
@pytest.mark.parametrize("family", ["llama", "gpt_neox", "glm", "cohere", "qwen3", "deepseek_v3"])
def test_each_layer_calls_it_and_numbers_stay(family, monkeypatch):
    calls = _counted(monkeypatch)
    torch.manual_seed(0)
    config = small_config(family)
    model = AutoModelForCausalLM.from_config(config).eval()
    ids = torch.arange(8)[None]
    before = model(ids).logits
    rotary.fuse_rotary(model, lambda path: True)
    assert calls == []
    assert torch.equal(model(ids).logits, before)
    assert len(calls) >= config.num_hidden_layers


def test_others_of_the_class_and_the_file_stay(monkeypatch):
    calls = _counted(monkeypatch)
    function = modeling_llama.apply_rotary_pos_emb
    torch.manual_seed(0)
    changed, other = (AutoModelForCausalLM.from_config(tiny.config("llama")) for _ in range(2))
    rotary.fuse_rotary(changed, lambda path: path.startswith("model.layers.0"))
    changed(torch.arange(4)[None])
    assert len(calls) == 1
    other(torch.arange(4)[None])
    assert len(calls) == 1
    assert modeling_llama.apply_rotary_pos_emb is function
    attention = changed.model.layers[0].self_attn
    assert inspect.signature(attention.forward) == inspect.signature(other.model.layers[0].self_attn.forward)


def _helper(x):
    return x + 1


def apply_rotary_here(x):
    return 2 * x


def _doubled(function):
    @functools.wraps(function)
    def doubled(*args, factor=2, **kwargs):
        return factor * function(*args, **kwargs)

    return doubled


@_doubled
def _decorated(x, *, more=1):
    return apply_rotary_here(_helper(x)) + more


def test_decorators_defaults_and_other_names_stay():
    rebound = rotary._with_globals(_decorated, {"apply_rotary_here": lambda x: 5 * x})
    assert _decorated(1) == 2 * (2 * 2 + 1)
    assert rebound(1) == 2 * (5 * 2 + 1)
    assert rebound(1, more=3, factor=1) == 5 * 2 + 3


def test_a_decorator_that_hides_its_function_is_left():
    def hidden(*args):
        return _decorated(*args)

    hidden.__wrapped__ = _helper
    assert rotary._with_globals(hidden, {"apply_rotary_here": abs}) is None
