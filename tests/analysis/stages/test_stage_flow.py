"""What layers read of earlier ones beside the hidden state."""

import pytest
import torch
from torch import nn

from megasched.analysis.find_layer_stack import find_layer_stack, measure_stage_inputs
from megasched.analysis.stages.output_refs import BEFORE, OutputRef


class Layer(nn.Module):
    def __init__(self, index, form):
        super().__init__()
        self.linear, self.index, self.form = nn.Linear(8, 8), index, form
        self.register_buffer("average", torch.zeros(8))

    def forward(self, x, read, shared):
        y = self.linear(x)
        if self.form == "mapping" and self.index == 0:
            shared["kv"] = (y * 2, y * 3)
        if self.form == "mapping" and self.index == 2:
            y = y * shared["kv"][1]
        if self.form == "attribute":
            KEPT[self.index] = y * 2
            y = y + KEPT.get(self.index - 2, 0)
        if self.form == "counted":
            COUNT.add_(1)
            y = y * COUNT
        if self.form == "averaged":
            self.average.lerp_(y.mean((0, 1)).detach(), 0.1)
            y = y - self.average
        if self.form == "replaced":
            self.average = self.average.lerp(y.mean((0, 1)).detach(), 0.1)
        if self.form == "bounded":
            self.linear.weight.data.clamp_(-1, 1)
        if self.form == "bounded anew":
            with torch.no_grad():
                self.linear.weight.clamp_(-1, 1)
        if self.form == "smaller":
            self.linear.weight.data.mul_(0.9)
        if self.form == "host":
            y = y * self.host[0].scale
        self.left = y.mean()
        if read is not None:
            y = y + read
        return (y, x.argmax(-1)) if self.form == "indices" else y


KEPT = {}
COUNT = torch.zeros((), device="meta")


class Model(nn.Module):
    """Four layers; ``form`` says what goes past which of them, and how."""

    def __init__(self, form):
        super().__init__()
        self.embed, self.out = nn.Embedding(9, 8), nn.Linear(8, 9)
        self.layers = nn.ModuleList(Layer(index, form) for index in range(4))
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(4))
        self.scale = nn.Parameter(torch.ones(8))
        self.form = form
        for layer in self.layers:
            layer.host = [self]

    def loss_function(self, logits, labels):
        return logits.sum()

    def forward(self, input_ids, labels=None):
        KEPT.clear()
        x = self.embed(input_ids) * (self.scale if self.form in ("scaled", "own") else 1)
        first, shared, states, indices = x, {}, [], None
        kept = x.new_zeros(4, *x.shape)
        for index, layer in enumerate(self.layers):
            read = None
            if self.form in ("embedding", "own") and index == 2:
                read = first * 2
            if self.form == "ids" and index == 3:
                read = input_ids.unsqueeze(-1) * 0.1
            if self.form == "shape" and index == 3:
                read = torch.zeros_like(first)
            if self.form == "changed" and states:
                x += 1
            if self.form == "changed in part" and states:
                x[:, 0] += 1
            if self.form in ("state", "changed", "changed in part") and index == 3:
                read = states[0]
            if self.form == "written" and index == 3:
                read = kept.mean(0)
            if self.form == "between":
                x = self.norms[index](x)
            if self.form == "weight" and index == 3:
                read = self.layers[1].linear.weight.detach()[0]
            x = layer(x, read, shared)
            if self.form == "copied" or (self.form == "written" and index < 3):
                kept[index] = x
            if self.form == "indices":
                x, indices = x
                x = x * (indices.unsqueeze(-1) > 0) if index else x
            states.append(x)
        if self.form == "copied":
            x = kept.mean(0)
        logits = self.out(x)
        if labels is None:
            return logits
        loss = self.loss_function(logits, labels)
        if self.form == "penalty":
            loss = loss + sum(layer.linear.weight.pow(2).sum() for layer in self.layers)
        if self.form == "left":
            loss = loss + sum(layer.left for layer in self.layers)
        return loss, logits


AFTER = "what comes after the layers reads "
OUTPUT = {index: OutputRef(f"layers.{index}") for index in range(4)}
ENTRY = [OutputRef("layers.0", index, 2, "kv") for index in range(2)]
SIDES = {
    "nothing": [],
    "scaled": [],
    "shape": [],
    "between": [],
    "embedding": [(BEFORE, 2, (OutputRef("embed"),))],
    "ids": [(BEFORE, 3, (OutputRef(""),))],
    "state": [(0, 3, (OUTPUT[0],))],
    "mapping": [(0, 2, (ENTRY[0],)), (0, 2, (ENTRY[1],))],
    "written": [(index, 3, (OUTPUT[index],)) for index in range(2)],
    "copied": [(index, 4, (OUTPUT[index],)) for index in range(3)],
    "indices": [(index, index + 1, (OutputRef(f"layers.{index}", 1),)) for index in range(1, 4)],
}


@pytest.mark.parametrize("form", SIDES)
def test_sides(form):
    structure = find_layer_stack(Model(form))
    assert [(side.made, side.read, side.places) for side in structure.stage_inputs] == SIDES[form]
    assert structure.uncuttable == ""
    for side in structure.stage_inputs:
        assert [b for b in range(5) if side.crosses(b)] == list(range(side.made + 1, side.read + 1))


def test_the_hidden_state_is_no_side_where_it_is_what_is_sent():
    structure = find_layer_stack(Model("state"))
    (side,) = structure.stage_inputs
    assert [structure.stage_inputs_at(boundary) for boundary in range(5)] == [(), (), (side,), (side,), ()]
    assert [structure.stage_inputs_in_hidden(boundary) for boundary in (1, 2)] == [(side,), ()]
    assert structure.token_ids is None
    assert find_layer_stack(Model("ids")).token_ids is not None


def test_modules_between_layers_belong_to_the_next_one():
    structure = find_layer_stack(Model("between"))
    assert {path: layers for path, (layers, _) in structure.between.items()} == {
        f"norms.{index}": (index,) for index in range(1, 4)
    }
    assert set(structure.before) == {"embed", "norms.0"}


@pytest.mark.parametrize(
    ("form", "why"),
    [
        ("attribute", "layer 2 reads what layer 0 made of layers.0.linear.bias, and was not handed it"),
        ("own", "scale, which is in no layer, goes into what layer 2 reads"),
        ("counted", "layer 1 reads a tensor that layer 0 wrote to, and was not handed it"),
        ("changed", "what layers.0 returns is changed in place by the model's own code, and read later"),
        ("changed in part", "what layers.0 returns is changed in place by the model's own code, and read later"),
        ("weight", "the code around them reads layers.1.linear.weight, which is on the stage of layer 1 alone"),
        ("host", "layer 0 reads scale, which is in no layer"),
        ("penalty", AFTER + "layers.0.linear.weight, which is on the stage of layer 0 alone"),
        ("left", AFTER + "what layer 0 made of layers.0.linear.bias, and was not handed it"),
    ],
)
def test_what_cant_be_carried(form, why):
    assert find_layer_stack(Model(form)).uncuttable == why


@pytest.mark.parametrize("form", ["averaged", "smaller", "bounded anew"])
def test_what_the_backward_of_another_micro_batch_needs_is_not_changed(form):
    why = find_layer_stack(Model(form)).uncuttable
    assert why.startswith("a forward changes layers.0.")
    assert why.endswith(" in place, which the backward of micro-batches before needs as it was")


@pytest.mark.parametrize("form", ["bounded", "replaced"])
def test_what_is_not_changed_for_them_is_no_matter(form):
    assert find_layer_stack(Model(form)).uncuttable == ""


def test_buffers_that_a_forward_changes():
    structure = find_layer_stack(Model("averaged"))
    assert structure.changed_buffers == tuple(f"layers.{index}.average" for index in range(4))
    assert find_layer_stack(Model("replaced")).changed_buffers == structure.changed_buffers
    assert find_layer_stack(Model("nothing")).changed_buffers == ()


def test_sides_are_measured_at_the_sizes_of_a_run():
    model = Model("indices")
    structure = find_layer_stack(model)
    measured = measure_stage_inputs(model, structure, 3, 17, torch.bfloat16)
    assert {place: (tuple(t.shape), t.dtype) for place, t in measured.items()} == {
        side.places[0]: ((3, 17), torch.int64) for side in structure.stage_inputs
    }
