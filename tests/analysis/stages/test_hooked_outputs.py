"""What HF's hooks record inside of layers: sides, where something after the layers reads it."""

import pytest
import torch
from torch import nn
from torch.utils._pytree import MappingKey, SequenceKey

from megasched.analysis.find_layer_stack import find_layer_stack, measure_stage_inputs
from megasched.analysis.stages.hooked_outputs import change_leaves
from megasched.analysis.stages.output_refs import OutputRef
from megasched.errors import MegaschedError

RECORDED = []
KEPT = []


class Router(nn.Linear):
    """Returns logits and choices."""

    def forward(self, x):
        logits = super().forward(x.flatten(0, 1))
        return logits, logits.argmax(-1)


class Layer(nn.Module):
    def __init__(self, form):
        super().__init__()
        self.router, self.out, self.form = Router(8, 4), nn.Linear(8, 8), form

    def forward(self, x):
        logits, choices = self.router(x)
        if self.form == "derived":
            KEPT.append(logits.softmax(-1))
        if self.form == "next" and KEPT:
            x = x + KEPT[-1].sum()
        if self.form == "next":
            KEPT.append(logits)
        if self.form == "twice":
            self.router(x)
        return self.out(x) * choices.view(*x.shape[:2], 1) + logits.sum()


class Around(nn.Module):
    """The model around the layers: runs them, and returns what hooks recorded."""

    def __init__(self, form, hooked):
        super().__init__()
        self.embed = nn.Embedding(9, 8)
        self.layers = nn.ModuleList(Layer(form) for _ in range(3))
        for index in hooked:
            self.layers[index].router.register_forward_hook(_record)

    def forward(self, input_ids):
        RECORDED.clear()
        KEPT.clear()
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return x, tuple(RECORDED)


def _record(module, args, output):
    RECORDED.append(output[0])


class Model(nn.Module):
    """``form`` says what is made of the router's logits, and where it is read."""

    def __init__(self, form, hooked=range(3)):
        super().__init__()
        self.model, self.head, self.form = Around(form, hooked), nn.Linear(8, 9), form

    def forward(self, input_ids):
        x, recorded = self.model(input_ids)
        logits = self.head(x)
        if self.form in ("read", "twice"):
            logits = logits + torch.cat(recorded).mean()
        if self.form == "derived":
            logits = logits + torch.cat(KEPT).mean()
        return logits


def place(index):
    return OutputRef(f"model.layers.{index}.router", 0)


@pytest.mark.parametrize("hooked", [(0, 1, 2), (1,)])
def test_what_is_recorded_and_read_after_the_layers_is_a_side(hooked):
    structure = find_layer_stack(Model("read", hooked))
    assert structure.uncuttable == ""
    assert structure.recorded == tuple(place(index) for index in hooked)
    assert [(side.made, side.read, side.places) for side in structure.stage_inputs] == [
        (index, 3, (place(index),)) for index in hooked
    ]
    assert [len(structure.stage_inputs_at(boundary)) for boundary in (1, 2)] == [
        sum(i < b for i in hooked) for b in (1, 2)
    ]


def test_it_is_measured():
    model = Model("read")
    measured = measure_stage_inputs(model, find_layer_stack(model), 3, 17, torch.bfloat16)
    assert {p: (tuple(t.shape), t.dtype) for p, t in measured.items()} == {
        place(index): ((51, 4), torch.bfloat16) for index in range(3)
    }


def test_what_nothing_reads_is_no_side():
    structure = find_layer_stack(Model("unread"))
    assert structure.recorded == tuple(place(index) for index in range(3))
    assert (structure.stage_inputs, structure.uncuttable) == ((), "")


AFTER = "what comes after the layers"


@pytest.mark.parametrize(
    ("form", "why"),
    [
        ("derived", f"{AFTER} reads what layer 0 made of model.layers.0.router, and was not handed it"),
        ("next", "layer 1 reads what layer 0 made of model.layers.0.router, and was not handed it"),
        ("twice", "model.layers.0.router runs 2 times, and what it returns is read later"),
    ],
)
def test_what_goes_other_ways_cant_be_carried(form, why):
    assert find_layer_stack(Model(form)).uncuttable == why


def test_leaves_are_changed_where_they_stand():
    leaf = MappingKey("router_logits"), SequenceKey(1)
    output = {"hidden": torch.zeros(2), "router_logits": (torch.ones(2), torch.ones(3))}
    changed = change_leaves("model", output, {leaf: lambda x: x * 2})
    assert [x.tolist() for x in changed["router_logits"]] == [[1, 1], [2, 2, 2]]
    with pytest.raises(
        MegaschedError, match=r"model returns no \['router_logits'\]\[1\], which HF's hooks recorded"
    ):
        change_leaves("model", {"hidden": torch.zeros(2)}, {leaf: lambda x: x})
