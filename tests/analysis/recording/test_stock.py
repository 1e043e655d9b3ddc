"""Whose code a model is made of."""

from __future__ import annotations

import types

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from megasched.analysis.recording.stock import all_stock, is_theirs
from megasched.definition.build import build_definition, init_empty_weights
from megasched.definition.small_models.small_models import small_config
from megasched.language.schedule import create_schedule
from megasched.lowering.lora import adapt_modules
from tests import tiny


@pytest.fixture
def llama():
    return build_definition(small_config("llama"))


class Mlp(LlamaMLP):
    """Of a test."""


def test_what_transformers_makes_is_stock(llama):
    assert all_stock(llama)
    assert all_stock(build_definition(small_config("gpt2")))


def test_with_adapters_it_is_still(llama):
    schedule = create_schedule(llama)
    schedule["model.layers.*.mlp.up_proj"].adapt(rank=4)
    adapt_modules(schedule, llama)
    assert llama.model.layers[0].mlp.up_proj._forward_hooks
    assert all_stock(llama)


def hooked(layer):
    layer.mlp.register_forward_hook(lambda module, args, output: output)


def hooked_backwards(layer):
    layer.mlp.register_full_backward_hook(lambda module, given, grads: None)


def patched(layer):
    layer.mlp.forward = types.MethodType(lambda self, x: x, layer.mlp)


def of_another_class(layer):
    with init_empty_weights():
        layer.mlp = Mlp(tiny.config("llama"))


@pytest.mark.parametrize("change", [hooked, hooked_backwards, patched, of_another_class])
def test_one_module_that_is_changed_tells(llama, change):
    change(llama.model.layers[1])
    assert not all_stock(llama)


def test_a_forward_that_is_put_on_a_class_tells(llama, monkeypatch):
    monkeypatch.setattr(LlamaRMSNorm, "forward", lambda self, x: x)
    assert not all_stock(llama)


def test_whose_a_function_is():
    assert is_theirs(torch.nn.functional.silu)
    assert is_theirs(LlamaMLP.forward)
    assert not is_theirs(hooked)
    assert not is_theirs(None)
