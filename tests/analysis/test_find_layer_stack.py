"""What a causal language model looks like when it runs, found without names."""

from typing import NamedTuple

import pytest
import torch
from torch import nn
from transformers import AutoConfig

from megasched.analysis.find_layer_stack import find_layer_stack
from megasched.analysis.stages.hidden_state import HiddenStateArg
from megasched.analysis.stages.shapes import Shape
from megasched.definition.build import build_definition
from megasched.errors import ScheduleError
from tests import tiny
from tests.lowering.models import tiny_config

LAYERS = {
    "gpt2": "transformer.h",
    "opt": "model.decoder.layers",
    "gpt_neox": "gpt_neox.layers",
}
BEFORE = {
    "gpt2": {"transformer.wte": ("b", "s", 32), "transformer.wpe": (1, "s", 32)},
    "opt": {"model.decoder.embed_tokens": ("b", "s", 32), "model.decoder.embed_positions": ("b", "s", 32)},
    "gpt_neox": {"gpt_neox.embed_in": ("b", "s", 32)},
}
AFTER = {
    "gpt2": ("transformer.ln_f", "lm_head"),
    "opt": ("model.decoder.final_layer_norm", "lm_head"),
    "gpt_neox": ("gpt_neox.final_layer_norm", "lm_head"),
}


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_layers_what_is_before_and_what_is_after(family):
    structure = find_layer_stack(build_definition(tiny_config(family, **_three(family))))
    assert structure.layers == LAYERS.get(family, "model.layers")
    assert structure.count == 3
    before = BEFORE.get(family, {"model.embed_tokens": ("b", "s", 32)})
    assert {path: shape.dims for path, shape in structure.before.items()} == before
    assert structure.after == AFTER.get(family, ("model.norm", "lm_head"))
    assert structure.slot.argument in (0, "hidden_states")
    assert (structure.stage_inputs, structure.between, structure.called, structure.uncuttable) == ((), {}, (), "")
    assert structure.hidden == Shape(("b", "s", 32), torch.float32)
    path = structure.layer_path(2)
    assert structure.index_of(path) == structure.index_of(path + ".mlp.deep") == 2
    assert structure.index_of(structure.layers) is None
    assert structure.index_of(structure.layers + "x.1") is None


def _three(family):
    return {"n_layer" if family == "gpt2" else "num_hidden_layers": 3}


def test_the_definition_is_not_touched():
    definition = build_definition(tiny_config("llama"))
    find_layer_stack(definition)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in definition.modules())
    assert {p.device.type for p in definition.parameters()} == {"meta"}
    assert {b.device.type for b in definition.buffers()} == {"cpu"}


class Named(NamedTuple):
    y: torch.Tensor
    number: int


class Layer(nn.Module):
    """Takes and returns its hidden state in a structure of the test's choice."""

    def __init__(self, form):
        super().__init__()
        self.linear, self.form = nn.Linear(8, 8), form

    def forward(self, mask, *, hidden_states):
        y = self.linear(hidden_states)
        return {
            "tensor": y,
            "tuple": ("word", y, None),
            "list": [y],
            "extra": (y, y.sum(-1)),
            "read": (y, y + 1),
            "named": Named(y, 1),
            "dict": {"y": y},
        }[self.form]


class Model(nn.Module):
    def __init__(self, form, calls=1, layers=2):
        super().__init__()
        self.embed = nn.Embedding(9, 8)
        self.layers = nn.ModuleList(Layer(form) for _ in range(layers))
        self.decoys = nn.ModuleList(nn.Linear(8, 8) for _ in range(9))
        self.out = nn.Linear(8, 9)
        self.form, self.calls = form, calls

    def forward(self, input_ids, labels=None):
        x = self.embed(input_ids)
        for _ in range(self.calls):
            for layer in self.layers:
                y = layer(input_ids > 0, hidden_states=x)
                x = y if self.form == "tensor" else y[{"tuple": 1, "dict": "y"}.get(self.form, 0)]
                x = x * y[1] if self.form == "read" else x
        return self.out(x)


@pytest.mark.parametrize(
    ("form", "slot", "stage_inputs"),
    [
        ("tensor", HiddenStateArg("hidden_states", None), []),
        ("tuple", HiddenStateArg("hidden_states", 1, ("word", None, None)), []),
        ("list", HiddenStateArg("hidden_states", 0, (None,), list), []),
        ("extra", HiddenStateArg("hidden_states", 0, (None, None)), []),
        ("read", HiddenStateArg("hidden_states", 0, (None, None)), [(0, 1), (1, 2)]),
        ("named", HiddenStateArg("hidden_states", 0, (None, 1), Named), []),
    ],
)
def test_where_the_hidden_state_stands(form, slot, stage_inputs):
    structure = find_layer_stack(Model(form))
    assert (structure.layers, structure.slot) == ("layers", slot)
    assert [(side.made, side.read) for side in structure.stage_inputs] == stage_inputs
    assert (structure.before, structure.after) == ({"embed": Shape(("b", "s", 8), torch.float32)}, ("out",))


class InADict(Model):
    """Its layers take the hidden state in a dict, too."""

    def forward(self, input_ids, labels=None):
        x = {"y": self.embed(input_ids)}
        for layer in self.layers:
            x = layer(x)
        return self.out(x["y"])


class TakesADict(Layer):
    def forward(self, given):
        return super().forward(None, hidden_states=given["y"])


def test_layers_without_a_hidden_state_of_their_own_are_refused():
    with pytest.raises(
        ScheduleError, match="this layer returns a dict without a tensor like what it takes"
    ) as raised:
        find_layer_stack(Model("dict"))
    assert raised.value.problems[0].module == "layers.1"
    model = InADict("tensor")
    model.layers = nn.ModuleList(TakesADict("dict") for _ in range(2))
    with pytest.raises(ScheduleError, match=r"this layer takes no tensor of floats by itself"):
        find_layer_stack(model)


class TakesWhatItReturns(Layer):
    """All layers but the first get a named tuple, and the last returns a tensor."""

    def forward(self, given, last=False):
        y = self.linear(given.y if isinstance(given, Named) else given)
        return y if last else Named(y, y * 2)


def test_layers_that_hand_each_other_a_container_can_not_be_cut():
    class Contained(Model):
        def forward(self, input_ids, labels=None):
            x = self.embed(input_ids)
            for layer in self.layers:
                x = layer(x, last=layer is self.layers[-1])
            return self.out(x)

    model = Contained("tensor", layers=3)
    model.layers = nn.ModuleList(TakesWhatItReturns("named") for _ in range(3))
    assert find_layer_stack(model).uncuttable == "they hand each other a Named, and no tensor by itself"


def test_layers_called_out_of_their_order_can_not_be_cut():
    class Reversed(Model):
        def forward(self, input_ids, labels=None):
            x = self.embed(input_ids)
            for layer in reversed(self.layers):
                x = layer(None, hidden_states=x)
            return self.out(x)

    structure = find_layer_stack(Reversed("tensor", layers=3))
    assert (structure.layers, structure.repeated, structure.called) == ("layers", True, (2, 1, 0))
    assert structure.uncuttable == "they are called out of their order"
    assert structure.first == 2


def test_one_layer_alone():
    assert find_layer_stack(Model("tensor", layers=1)).slot == HiddenStateArg("hidden_states", None)


def test_layers_that_are_not_called_are_no_list_of_layers():
    model = Model("tensor")
    model.forward = lambda input_ids, labels=None: model.out(model.embed(input_ids))
    with pytest.raises(ScheduleError, match="no list of layers found") as raised:
        find_layer_stack(model)
    assert "whose modules are all called" in raised.value.problems[0].remedy


@pytest.mark.parametrize(("calls", "layers"), [(3, 1), (2, 3)], ids=["one that is shared", "a loop"])
def test_layers_called_again_and_again_can_not_be_cut(calls, layers):
    structure = find_layer_stack(Model("tensor", calls=calls, layers=layers))
    assert (structure.layers, structure.count, structure.repeated) == ("layers", layers, True)
    assert structure.uncuttable == "they are called more than once"
    assert structure.calls.items() >= {f"layers.{index}": calls for index in range(layers)}.items()
    assert not find_layer_stack(Model("tensor", layers=layers)).repeated


def test_layers_in_a_loop_come_before_a_smaller_list_called_once():
    class Looped(Model):
        def __init__(self):
            super().__init__("tensor", calls=2)
            self.first = nn.ModuleList([Layer("tensor")])

        def forward(self, input_ids, labels=None):
            x = self.first[0](None, hidden_states=self.embed(input_ids))
            for layer in [*self.layers, *self.layers]:
                x = layer(None, hidden_states=x)
            return self.out(x)

    structure = find_layer_stack(Looped())
    assert (structure.layers, structure.repeated) == ("layers", True)
    assert list(structure.before) == ["embed", "first.0.linear"]


def test_a_model_that_cant_run_names_the_module():
    model = Model("tensor")
    model.layers[1].linear = nn.Linear(7, 8)
    with pytest.raises(ScheduleError, match="the forward fails in a trial call") as raised:
        find_layer_stack(model)
    assert raised.value.problems[0].module == "layers.1.linear"


def test_experts_in_a_grouped_product_run_on_meta():
    sizes = {"num_local_experts": 4, "num_key_value_heads": 2, "bos_token_id": 0, "eos_token_id": 0}
    config = AutoConfig.for_model("mixtral", **{**tiny.FAMILIES["llama"], **sizes})
    structure = find_layer_stack(build_definition(config))
    assert (structure.layers, structure.count) == ("model.layers", 4)


def test_slots_read_and_put():
    hidden, new = torch.zeros(1), torch.ones(1)
    for slot, args, kwargs in (
        (HiddenStateArg(1, None), ("mask", hidden), {}),
        (HiddenStateArg("x", None), ("mask",), {"x": hidden}),
        (HiddenStateArg(0, None), (), {"hidden_states": hidden}),
    ):
        assert slot.get(args, kwargs) is hidden
        put = slot.put(new, args, kwargs)
        assert slot.get(*put) is new
        assert (len(put[0]), put[1].keys()) == (len(args), kwargs.keys())
    plain, nested, listed = (
        HiddenStateArg(0, None),
        HiddenStateArg(0, 1, ("a", None)),
        HiddenStateArg(0, 0, (None, 2), list),
    )
    assert plain.wrap(new) is plain.rewrap(hidden, new) is plain.result(new) is new
    assert nested.wrap(new) == ("a", new)
    assert nested.rewrap(("b", hidden), new) == ("b", new)
    assert nested.result(("b", hidden)) is hidden
    named = HiddenStateArg(0, 0, (None, 2), Named)
    assert named.wrap(new) == named.rewrap(Named(hidden, 2), new) == Named(new, 2)
    assert type(named.wrap(new)) is type(named.rewrap(Named(hidden, 2), new)) is Named
    assert listed.wrap(new) == listed.rewrap([hidden, 2], new) == [new, 2]
