"""Megatron's modules stand for parts of a definition that are as transformers makes them, and for no others."""

from __future__ import annotations

from functools import partial, wraps

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel, Qwen3MoeForCausalLM
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock, Qwen3MoeTopKRouter

from megasched.definition.build import init_empty_weights
from megasched.errors import Declined
from megasched.language.module_specs import AttentionSpec, LayerSpec, MoeSpec
from megasched.model_adapters.reading import stock
from megasched.model_adapters.registry import roles_of
from tests import tiny


class MyLlama(LlamaForCausalLM):
    """Nothing of it is altered."""


class MyMixture(Qwen3MoeForCausalLM):
    """Nothing of it is altered."""


class Untied(LlamaForCausalLM):
    """More than a stock class has, but nothing that it calls."""

    def __init__(self, config):
        super().__init__(config)
        self.probe = nn.Linear(4, 4)
        self.post_init()

    def report(self):
        return "fine"


class Prefix(LlamaForCausalLM):
    """Another mask than the definition's own."""

    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


class Inner(LlamaModel):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


class Clamped(LlamaRMSNorm):
    def forward(self, hidden_states):
        return super().forward(hidden_states).clamp(-3, 3)


class Scaled(LlamaAttention):
    """Made alike, and run alike; but a class of its own."""


class ScaledMixture(Qwen3MoeSparseMoeBlock):
    def forward(self, hidden_states):
        return 0.7 * super().forward(hidden_states)


class Tempered(Qwen3MoeTopKRouter):
    def forward(self, hidden_states):
        return super().forward(hidden_states / 2)


def made(cls, family="llama"):
    with init_empty_weights():
        return cls._from_config(tiny.config(family))


def exchange(path, cls, *more):
    def alter(model):
        parent, _, name = path.rpartition(".")
        with init_empty_weights():
            setattr(model.get_submodule(parent), name, cls(model.config, *more))

    return alter


def norm(model):
    with init_empty_weights():
        model.model.layers[1].input_layernorm = Clamped(model.config.hidden_size, model.config.rms_norm_eps)


def wrapped(model):
    layer = model.model.layers[0]
    layer.forward = layer.forward


def number(model):
    model.model.layers[1].self_attn.scaling *= 2


def activation(model):
    model.model.layers[1].mlp.act_fn = nn.GELU()


def angles(model):
    model.model.rotary_emb.inv_freq *= 0.5


def hook(model):
    model.model.layers[1].self_attn.register_forward_hook(lambda module, args, output: None)


def another_model(model):
    with init_empty_weights():
        model.model = Inner(model.config)


@pytest.mark.parametrize("cls", [LlamaForCausalLM, MyLlama, Untied])
def test_what_is_not_altered_is_megatrons(cls):
    roles = roles_of(made(cls))
    assert isinstance(roles.layer, LayerSpec)
    assert isinstance(roles.attention, AttentionSpec)


ALTERED = {
    "model.layers.1.self_attn is a Scaled, and transformers has a LlamaAttention": exchange(
        "model.layers.1.self_attn", Scaled, 1
    ),
    "model.layers.1.input_layernorm is a Clamped": norm,
    "model.layers.0 has another forward": wrapped,
    "model.layers.1.self_attn has another scaling": number,
    "model.layers.1.mlp.act_fn is a GELU": activation,
    "model.rotary_emb holds something else": angles,
    "model.layers.1.self_attn has another _forward_hooks": hook,
    "Inner, which is around it, has a forward of its own": another_model,
}


@pytest.mark.parametrize(("reason", "alter"), ALTERED.items(), ids=[alter.__name__ for alter in ALTERED.values()])
def test_what_is_altered_stays_as_it_is(reason, alter):
    model = made(MyLlama)
    alter(model)
    assert reason in str(roles_of(model).layer)


def test_attention_alone_does_not_ask_for_the_rest_of_the_layer():
    model = made(MyLlama)
    norm(model)
    roles = roles_of(model)
    assert isinstance(roles.layer, Declined)
    assert isinstance(roles.attention, AttentionSpec)


def test_a_forward_of_the_class_itself_may_hand_in_other_masks():
    roles = roles_of(made(Prefix))
    assert str(roles.layer) == str(roles.attention) == "Prefix, which is around it, has a forward of its own"


@pytest.mark.parametrize(
    ("reason", "alter"),
    [
        ("mlp is a ScaledMixture", exchange("model.layers.1.mlp", ScaledMixture)),
        ("mlp.gate is a Tempered", exchange("model.layers.0.mlp.gate", Tempered)),
    ],
)
def test_a_mixture_that_is_altered_stays_as_it_is(reason, alter):
    model = made(MyMixture, "qwen3_moe")
    assert isinstance(roles_of(model).moe, MoeSpec)
    alter(model)
    roles = roles_of(model)
    assert reason in str(roles.moe)
    assert reason in str(roles.layer)
    assert isinstance(roles.attention, AttentionSpec)


@pytest.fixture
def _fresh_code():
    """What is known of classes is forgotten before and after."""
    stock._foreign.cache_clear()
    yield
    stock._foreign.cache_clear()


@pytest.mark.usefixtures("_fresh_code")
@pytest.mark.parametrize(
    ("owner", "name", "told"),
    [
        (LlamaAttention, "forward", "LlamaAttention.forward"),
        (modeling_llama, "apply_rotary_pos_emb", "LlamaAttention.apply_rotary_pos_emb"),
        (LlamaModel, "forward", "LlamaModel.forward"),
        (LlamaMLP, "forward", "LlamaMLP.forward"),
    ],
)
def test_transformers_code_that_was_exchanged_is_seen_in_its_own_classes(monkeypatch, owner, name, told):
    def other(*args, **kwargs):
        raise AssertionError

    monkeypatch.setattr(owner, name, other)
    assert str(roles_of(made(LlamaForCausalLM)).layer) == f"{told} is not transformers' own"


def without_a_module(original):
    def other(*args, **kwargs):
        raise AssertionError

    other.__module__ = None
    return other


def under_its_name(original):
    @wraps(original)
    def other(*args, **kwargs):
        raise AssertionError

    return other


def bound(original):
    return partial(under_its_name(original), 1)


class Called:
    """Neither function nor method, but called as one."""

    def __init__(self, original):
        self.original = original

    def __call__(self, *args, **kwargs):
        raise AssertionError


@pytest.mark.usefixtures("_fresh_code")
@pytest.mark.parametrize("other", [without_a_module, under_its_name, bound, Called])
@pytest.mark.parametrize(
    ("owner", "name", "told"),
    [
        (LlamaAttention, "forward", "LlamaAttention.forward"),
        (modeling_llama, "apply_rotary_pos_emb", "LlamaAttention.apply_rotary_pos_emb"),
        (modeling_llama, "rotate_half", "LlamaAttention.rotate_half"),
    ],
)
def test_code_that_does_not_say_whose_it_is_is_not_transformers(monkeypatch, owner, name, told, other):
    monkeypatch.setattr(owner, name, other(getattr(owner, name)))
    assert str(roles_of(made(LlamaForCausalLM)).layer) == f"{told} is not transformers' own"


def test_a_config_that_transformers_has_no_model_of():
    class MyConfig(LlamaConfig):
        pass

    class OfMine(LlamaForCausalLM):
        config_class = MyConfig

    with init_empty_weights():
        model = OfMine(MyConfig(**tiny.config("llama").to_diff_dict()))
    assert str(roles_of(model).layer) == "transformers has no model of a MyConfig to compare it with"
    assert torch.equal(model.model.rotary_emb.inv_freq, made(MyLlama).model.rotary_emb.inv_freq)
