"""Megatron's layers, attention and mixtures stand in where numbers show that they compute what HF's do."""

from __future__ import annotations

import copy
from functools import cache

import pytest
import torch
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

from megasched import create_schedule, patches
from megasched.definition.build import init_empty_weights
from megasched.definition.small_models.small_models import small_config
from megasched.language.module_specs import AttentionSpec, LayerSpec, MoeSpec
from megasched.language.parallel_dims import ParallelDims
from megasched.layers.megatron import trial
from megasched.layers.megatron.trial import why_another
from megasched.layers.megatron.trials import Trials
from megasched.model_adapters.default_schedule import schedule as default_schedule
from megasched.model_adapters.registry import roles_of
from megasched.plan.make import make_plan
from megasched.plan.megatron.fit import TrialSubject
from tests.model_adapters.facts import facts_of
from tests.parity.cases import case

LAYER = "model.layers.1"
# One has no attention or layers at its defaults (soft caps); they are in tests/parity.
TYPES = sorted({*facts_of("attention"), *facts_of("layer"), *facts_of("moe")} - {"gemma2", "vaultgemma"})
# Layers of others, GPT-2's and Phi-3's among them, are tried by the runs of tests/parity.
FAST = ("deepseek_v3", "gemma3_text", "gpt_oss", "nemotron_h", "qwen3_next")


def made(model_type, **changes):
    from transformers import AutoModelForCausalLM

    config = small_config(model_type)
    for name, value in changes.items():
        setattr(config, name, value)
    with init_empty_weights():
        return AutoModelForCausalLM.from_config(config)


def planned(model):
    schedule = create_schedule(model, ParallelDims(), roles_of(model))
    default_schedule(schedule, ParallelDims())
    return make_plan(schedule, causal_lm=True, trials=Trials)


@cache
def unaltered(model_type):
    """Returns the plan of a model as transformers makes it."""
    return planned(made(model_type))


def subjects_of(plan):
    found = []
    for layer in plan.structure.layer_paths():
        attention, block, mixture = plan.roles.attention, plan.roles.layer, plan.roles.moe
        mixed = isinstance(mixture, MoeSpec) and plan.holds_parameters(f"{layer}.{mixture.experts}")
        if isinstance(attention, AttentionSpec) and plan.holds_parameters(f"{layer}.{attention.out}"):
            found.append(TrialSubject("attention", f"{layer}.{attention.module}", layer))
        if isinstance(block, LayerSpec) and (mixed or plan.holds_parameters(f"{layer}.{block.mlp.down}")):
            found.append(TrialSubject("layer", layer, layer))
        if mixed:
            found.append(TrialSubject("mixture", f"{layer}.{mixture.module}", layer))
    return found


@pytest.mark.parametrize("model_type", [case(one, fast=one in FAST) for one in TYPES])
def test_what_is_as_transformers_makes_it_is_proven(model_type):
    model = made(model_type)
    plan = planned(model)
    subjects = subjects_of(plan)
    assert subjects
    tried = Trials(plan, model, subjects)
    assert {subject: reason for subject in subjects if (reason := tried(subject))} == {}


def scale(model):
    model.get_submodule(LAYER).self_attn.scaling *= 1.1


def dropout(model):
    model.get_submodule(LAYER).self_attn.attention_dropout = 0.1


def window(model):
    model.get_submodule(LAYER).self_attn.sliding_window = 3


def no_window(model):
    model.config.sliding_window = 12


def epsilon(model):
    model.get_submodule(LAYER).input_layernorm.variance_epsilon = 2e-6


def activation(model):
    model.get_submodule(LAYER).mlp.act_fn = torch.nn.GELU()


def of_mlp(model):
    """As a layer's own multiplier would."""
    model.get_submodule(LAYER).mlp.register_forward_hook(lambda module, args, output: 0.5 * output)


def of_gradient(model):
    """The forward is the same."""

    def double(module, given, gradients):
        return (2 * given[0],)

    model.get_submodule(LAYER).mlp.register_full_backward_hook(double)


def heads(model):
    own = copy.deepcopy(model.config)
    own.num_attention_heads = 2
    model.get_submodule(LAYER).self_attn.config = own


def routed(model):
    model.get_submodule(LAYER).mlp.routed_scaling_factor = 0.7
    model.get_submodule(LAYER).mlp.gate.routed_scaling_factor = 0.7


def chosen(model):
    model.get_submodule(LAYER).mlp.gate.top_k = 1


def limit(model):
    model.get_submodule(LAYER).mlp.experts.limit = 5.0


def temperature(model):
    model.get_submodule(LAYER).mlp.router.register_forward_pre_hook(lambda module, args: (args[0] / 2,))


OUTPUT = "of inputs of size 1, its output is another than Megatron's"
ALTERED = [
    ("mistral", "attention", scale, OUTPUT),
    ("mistral", "layer", scale, OUTPUT),
    ("mistral", "attention", dropout, OUTPUT),
    ("gemma3_text", "attention", window, "it asks for attention in a window of 3 tokens"),
    ("mistral", "attention", no_window, OUTPUT),
    ("mistral", "layer", epsilon, "of inputs of size 0.001, its output"),
    ("mistral", "layer", activation, OUTPUT),
    ("mistral", "layer", of_mlp, OUTPUT),
    ("mistral", "layer", of_gradient, "of inputs of size 1, its gradient of the input"),
    ("phi3", "attention", heads, "a small copy of it can't be tried: "),
    ("deepseek_v3", "mixture", routed, OUTPUT),
    ("deepseek_v3", "mixture", chosen, OUTPUT),
    ("gpt_oss", "mixture", limit, OUTPUT),
    ("gpt_oss", "mixture", temperature, OUTPUT),
]


@pytest.mark.parametrize(
    ("model_type", "kind", "alter", "told"), ALTERED, ids=[f"{row[1]}-{row[2].__name__}" for row in ALTERED]
)
def test_an_instance_that_was_altered_since_stays_as_it_is(model_type, kind, alter, told):
    """After what is said of it was read off it, as a schedule can."""
    model, plan = made(model_type), unaltered(model_type)
    subjects = subjects_of(plan)
    alter(model)
    tried = Trials(plan, model, subjects)
    (subject,) = (one for one in subjects if one.kind == kind and one.layer == LAYER)
    assert tried(subject).startswith(f"it computes something else than Megatron's: {told}")


def test_rotary_positions_that_were_altered_are_megatrons_too():
    model = made("mistral")
    model.model.rotary_emb.inv_freq *= 0.5
    plan = planned(model)
    assert not why_another(plan, model, TrialSubject("layer", LAYER, LAYER))


def test_layers_that_are_alike_are_tried_once(monkeypatch):
    """The first and the last of them, and one that is not."""
    model = made("mistral", num_hidden_layers=6)
    plan = planned(model)
    subjects = [one for one in subjects_of(plan) if one.kind == "layer"]
    activation(model)
    asked = []

    def tried(plan, model, subject):
        asked.append(subject.layer)
        return ""

    monkeypatch.setattr(trial, "why_another", tried)
    for _ in range(2):  # of another layout
        known = Trials(plan, model, subjects)
        assert not any(known(subject) for subject in subjects)
    assert asked == ["model.layers.0", "model.layers.5", LAYER]


def test_a_router_is_tried_where_transformer_engine_is_installed(monkeypatch):
    """Megatron's then computes by Transformer Engine's product, which takes no tensor of the host."""

    def product(*args, **kwargs):
        raise RuntimeError("CUDAGuardImpl initialized with non-CUDA DeviceType: cpu")

    monkeypatch.setattr(moe_utils, "te_general_gemm", product)
    model = made("mixtral")
    plan = planned(model)
    assert why_another(plan, model, TrialSubject("layer", LAYER, LAYER)) == ""
    assert moe_utils.te_general_gemm is product


def test_a_trial_changes_nothing():
    model = made("deepseek_v3")
    plan = planned(model)
    before = {name: (type(value), id(value)) for name, value in vars(model.get_submodule(LAYER)).items()}
    state, active = torch.get_rng_state(), patches.active()
    assert not why_another(plan, model, TrialSubject("layer", LAYER, LAYER))
    assert {name: (type(value), id(value)) for name, value in vars(model.get_submodule(LAYER)).items()} == before
    assert torch.equal(torch.get_rng_state(), state)
    assert all(held.is_meta for held in model.parameters())
    assert not torch.distributed.is_initialized()
    assert patches.active() == active
    assert MoEAlltoAllTokenDispatcher.cuda_dtoh_stream is None
