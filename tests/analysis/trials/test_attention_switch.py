"""Whose attention is called: ours, only where it is shown to compute what the definition's would."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import LlamaForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaAttention, apply_rotary_pos_emb

from megasched.definition.attention_interface import EAGER_MASK, NAME
from megasched.errors import MegaschedError
from megasched.layers.attention import attention_forward, enable
from tests.lowering.models import tiny_model


def squared_relu(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
    """No softmax."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    weights = F.relu(query @ key.transpose(2, 3) * scaling + 1).square().tril()
    return (weights @ value).transpose(1, 2).contiguous(), weights


def tempered(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
    """Softmax, at a temperature that the module has."""
    scaling *= getattr(module, "temperature", 1.0)
    return modeling_llama.eager_attention_forward(module, query, key, value, attention_mask, scaling, dropout)


def of_many_tokens(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
    """Sharper, the more tokens there are, from 32 on."""
    scaling *= max(1.0, math.log(key.shape[2]) / math.log(32))
    return modeling_llama.eager_attention_forward(module, query, key, value, attention_mask, scaling, dropout)


class Own(LlamaAttention):
    """Llama's, with a function of its own by default."""

    own = staticmethod(modeling_llama.eager_attention_forward)
    by_interface = True

    def forward(
        self, hidden_states, position_embeddings=None, attention_mask=None, past_key_values=None, **kwargs
    ):
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        projections = (self.q_proj, self.k_proj, self.v_proj)
        query, key, value = (project(hidden_states).view(shape).transpose(1, 2) for project in projections)
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        name = self.config._attn_implementation
        if self.by_interface:
            function = ALL_ATTENTION_FUNCTIONS.get_interface(name, self.own)
        else:
            function = self.own if name == "eager" else ALL_ATTENTION_FUNCTIONS[name]
        output, weights = function(self, query, key, value, attention_mask, scaling=self.scaling, dropout=0.0)
        return self.o_proj(output.reshape(*hidden_states.shape[:-1], -1)), weights


class EagerAlone(LlamaForCausalLM):
    _supports_sdpa = _supports_flash_attn = _supports_flex_attn = False


def model_of(attention, cls=EagerAlone):
    config = tiny_model("llama").config
    config._attn_implementation = None
    model = cls._from_config(config)
    for index, layer in enumerate(model.model.layers):
        layer.self_attn = attention(model.config, index)
    return model


def kind(function, **attributes):
    return type("Kind", (Own,), {"own": staticmethod(function), **attributes})


@pytest.mark.parametrize(
    ("attention", "switched"),
    [
        (Own, True),
        (kind(tempered), True),
        (kind(tempered, temperature=0.7), False),
        (kind(squared_relu), False),
        (kind(of_many_tokens), False),
        (kind(modeling_llama.eager_attention_forward, by_interface=False), False),  # nothing is seen of it
    ],
    ids=["softmax", "a temperature of 1", "a temperature", "no softmax", "by length", "not by the interface"],
)
def test_a_class_with_eager_attention_alone(attention, switched):
    model = model_of(attention)
    assert model.config._attn_implementation == "eager"
    enable(model)
    assert model.config._attn_implementation == (EAGER_MASK if switched else "eager")


def test_one_layer_of_another_kind_is_enough():
    model = model_of(kind(tempered))
    model.model.layers[1].self_attn.temperature = 0.7
    enable(model)
    assert model.config._attn_implementation == "eager"


def test_eager_attention_does_not_matter_to_who_calls_sdpa():
    model = model_of(kind(squared_relu), LlamaForCausalLM)
    assert model.config._attn_implementation == "sdpa"
    enable(model)
    assert model.config._attn_implementation == NAME


def test_a_name_that_a_user_registered_stays(monkeypatch):
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "squared_relu", squared_relu)
    model = tiny_model("llama")
    model.config._attn_implementation = "squared_relu"
    enable(model)
    assert model.config._attn_implementation == "squared_relu"


def test_a_name_of_transformers_with_another_function_stays(monkeypatch):
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", squared_relu)
    model = tiny_model("llama")
    enable(model)
    assert model.config._attn_implementation == "sdpa"


def test_names_are_put_back():
    model = tiny_model("llama")
    restore = enable(model)
    assert model.config._attn_implementation == NAME
    restore()
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("more", [{"temperature": 0.7}, {"keep_top": 4}, {"bias": torch.ones(2)}, {"flag": False}])
def test_arguments_that_are_not_known_are_refused_by_name(more):
    x = torch.randn(1, 2, 3, 4)
    with pytest.raises(MegaschedError, match=f"calls attention with {next(iter(more))}"):
        attention_forward(nn.Identity(), x, x, x, None, **more)
    attention_forward(nn.Identity(), x, x, x, None, temperature=None, use_cache=True, position_ids=x)
