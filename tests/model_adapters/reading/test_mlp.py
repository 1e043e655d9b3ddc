"""Which modules compute what Megatron's MLP does: forms, activations, and what tells others apart."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers.activations import ACT2FN
from transformers.pytorch_utils import Conv1D

from megasched.definition.small_models.small_models import small_config
from megasched.language.module_specs import LayerSpec, MlpSpec
from megasched.model_adapters.reading.mlp import read_mlps
from megasched.model_adapters.registry import roles_of
from tests.model_adapters.facts import facts_of

H, INSIDE = 16, 24


class Gated(nn.Module):
    def __init__(self, act=F.silu):
        super().__init__()
        self.w1, self.w2, self.w3 = nn.Linear(H, INSIDE), nn.Linear(INSIDE, H), nn.Linear(H, INSIDE)
        self.act = act

    def forward(self, x):
        return self.w2(self.act(self.w1(x)) * self.w3(x))


class Plain(nn.Module):
    def __init__(self, act=F.relu, inputs=None, dropout=0.0):
        super().__init__()
        self.fc1, self.fc2 = inputs or nn.Linear(H, INSIDE), nn.Linear(INSIDE, H)
        self.act, self.dropout = act, nn.Dropout(dropout)

    def forward(self, x):
        return self.dropout(self.fc2(self.act(self.fc1(x))))


class Packed(nn.Module):
    def __init__(self, gate=0):
        super().__init__()
        self.both, self.down = nn.Linear(H, 2 * INSIDE, bias=False), nn.Linear(INSIDE, H, bias=False)
        self.gate = gate

    def forward(self, x):
        parts = self.both(x).chunk(2, dim=-1)
        return self.down(F.silu(parts[self.gate]) * parts[1 - self.gate])


class Doubled(Gated):
    def forward(self, x):
        return 2 * super().forward(x)


class OfTwo(Gated):
    def forward(self, x, residual):
        return super().forward(x) + residual


class WithScores(Gated):
    def forward(self, x):
        return super().forward(x), None


class DropsInside(Gated):
    def forward(self, x):
        return F.dropout(super().forward(x), 0.1, self.training)


class Scaled(Gated):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(H))


class Layer(nn.Module):
    def __init__(self, **parts):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)


class Model(nn.Module):
    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)


def found_in(module):
    with torch.device("meta"):
        return read_mlps(Model(Layer(ff=module)))


GATED = MlpSpec("ff.w1", "ff.w3", "ff.w2")
PLAIN = MlpSpec("", "ff.fc1", "ff.fc2")


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (Gated, GATED),
        (lambda: Gated(ACT2FN["gelu"]), replace(GATED, activation="gelu")),
        (lambda: Gated(ACT2FN["gelu_pytorch_tanh"]), replace(GATED, activation="gelu_tanh")),
        (lambda: Gated(ACT2FN["gelu_new"]), replace(GATED, activation="gelu_tanh")),
        (lambda: Gated(ACT2FN["gelu_fast"]), replace(GATED, activation="gelu_tanh")),
        (Plain, replace(PLAIN, activation="relu")),
        (lambda: Plain(ACT2FN["relu2"]), replace(PLAIN, activation="squared_relu")),
        (lambda: Plain(inputs=Conv1D(INSIDE, H)), replace(PLAIN, activation="relu")),
        (Packed, MlpSpec("", "", "ff.down", "ff.both")),
    ],
)
def test_forms_and_activations(make, expected):
    found = found_in(make())
    assert found == {"layers.0.ff": expected}


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: Gated(ACT2FN["quick_gelu"]), "it computes something else than Megatron's"),
        (Doubled, "it computes something else than Megatron's"),
        (lambda: Packed(gate=1), "it computes something else than Megatron's"),
        (OfTwo, "a small copy of it can't be tried: TypeError"),
        (WithScores, "it returns something else than a hidden state"),
        (lambda: Plain(dropout=0.1), "it drops out in training, and Megatron's does not"),
        (DropsInside, "it computes something else than Megatron's"),
    ],
)
def test_others_are_told_apart(make, reason):
    found = found_in(make())
    assert set(found) == {"layers.0.ff"}
    assert found["layers.0.ff"].reason.startswith(reason)


@pytest.mark.parametrize("make", [Scaled, lambda: Gated(nn.PReLU()), lambda: nn.Linear(H, H)])
def test_what_has_other_parameters_is_no_mlp(make):
    assert found_in(make()) == {}


def test_layers_may_differ():
    with torch.device("meta"):
        found = read_mlps(Model(Layer(ff=Gated()), Layer(ff=Doubled()), Layer(ff=Gated(F.relu))))
    assert found["layers.0.ff"] == GATED
    assert found["layers.1.ff"].reason == "it computes something else than Megatron's"
    assert found["layers.2.ff"] == replace(GATED, activation="relu")


def test_experts_in_a_list_are_none():
    experts = nn.ModuleList([Gated(), Gated()])
    assert read_mlps(Model(Layer(experts=experts))) == {}


def test_a_trial_changes_nothing():
    model = Model(Layer(ff=Plain().eval()))
    before, weights = torch.get_rng_state(), dict(model.named_parameters())
    assert read_mlps(model)
    assert torch.equal(torch.get_rng_state(), before)
    after = dict(model.named_parameters())
    assert after.keys() == weights.keys()
    assert all(after[name] is weight for name, weight in weights.items())
    assert not any(module.training for module in model.layers[0].ff.modules())


@pytest.mark.parametrize("model_type", sorted(facts_of("layer")))
def test_facts_of_whole_layers_say_the_same(model_type):
    """What families say by names is what numbers show."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(small_config(model_type))
    roles = roles_of(model)
    block = roles.layer
    if not isinstance(block, LayerSpec):
        assert "soft" in str(block)
        return
    module = block.mlp.down.rpartition(".")[0]
    found = {mlp for path, mlp in roles.mlps.items() if path.endswith(f".{module}")}
    everywhere = {path for path, _ in model.named_modules() if path.endswith(f".{block.mlp.down}")}
    # OPT's like keep theirs in the layer, and some have experts everywhere.
    assert found == ({block.mlp} if module and everywhere else set())
