"""What layers tell each other through Python objects is not carried from stage to stage, and is seen."""

import pytest
import torch
from torch import nn

from megasched.analysis.find_layer_stack import find_layer_stack
from megasched.trainer.stages.stage_trial import why_not_alone


class Layer(nn.Module):
    """``form`` says what it does with an object that all layers share."""

    def __init__(self, form, state):
        super().__init__()
        self.linear, self.norm, self.form, self.state = nn.Linear(8, 8), nn.LayerNorm(8), form, state

    def forward(self, x):
        y = self.linear(x)
        if self.form == "number":
            self.state["calls"] = self.state.get("calls", 0) + 1
            y = y * (1 + 0.1 * self.state["calls"])
        if self.form == "branch":
            self.state.setdefault("calls", []).append(1)
            y = self.norm(y) if len(self.state["calls"]) > 2 else y
        if self.form == "needed":
            y = y * self.state.pop("from before", 1)
            self.state.setdefault("twice", iter((1, 2, 3, 4)))
            y = y + next(self.state["twice"])
        if self.form == "own":
            self.calls = getattr(self, "calls", 0) + 1
        return y


class Model(nn.Module):
    def __init__(self, form):
        super().__init__()
        self.form, self.state = form, {}
        self.embed, self.head = nn.Embedding(9, 8), nn.Linear(8, 9)
        self.layers = nn.ModuleList(Layer(form, self.state) for _ in range(4))

    def forward(self, input_ids):
        self.state.clear()
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        if self.form == "after":
            x = x * sum(getattr(layer, "scale", 1) for layer in self.layers)
        return self.head(x)


def why_not(model):
    structure = find_layer_stack(model)
    return why_not_alone(model, structure, structure.take_tape)


@pytest.mark.parametrize("form", ["number", "branch", "needed"])
def test_state_that_layers_share_is_seen(form):
    model = Model(form)
    found = why_not(model)
    assert "layers.2" in found
    assert "what layers of earlier stages left to it" in found


@pytest.mark.parametrize("form", ["nothing", "own", "after"])
def test_what_is_a_layers_own_or_the_models_is_no_obstacle(form):
    model = Model(form)
    assert why_not(model) == ""


def test_one_layer_has_no_boundary():
    model = Model("number")
    model.layers = model.layers[:1]
    assert why_not(model) == ""


def test_state_that_is_read_after_the_layers_is_seen():
    class Counting(Model):
        def forward(self, input_ids):
            super().forward(input_ids)
            return self.embed(input_ids) * self.state["calls"]

    model = Counting("number")
    assert why_not(model) != ""
    assert torch.is_grad_enabled()
