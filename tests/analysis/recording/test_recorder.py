"""What a tape holds of a forward."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn
from transformers.modeling_outputs import CausalLMOutput

from megasched.analysis.find_layer_stack import find_layer_stack, record_definition
from megasched.analysis.recording.meta_call import meta_copy
from megasched.analysis.recording.recorder import record_tape
from megasched.analysis.recording.tape import TapeReader
from megasched.errors import ScheduleError


class Names(TapeReader):
    """The events, by name."""

    def __init__(self):
        self.seen = []

    def operation(self, operation):
        self.seen.append(operation.func.__name__)

    def enter(self, call):
        self.seen.append(f"enter {call.path}")

    def leave(self, call):
        self.seen.append(f"leave {call.path}")

    def question(self, question):
        self.seen.append(f"asked at line {question.site.line}" if question.site else "asked")

    def numbers_given(self, values):
        self.seen.append(f"given {values}")

    def hook_registered(self, tensor, hook):
        self.seen.append("hook")


def names_of(tape):
    names = Names()
    tape.read(names)
    return names.seen


def module(forward):
    """A module with this forward, on meta."""
    made = nn.Module()
    made.forward = forward
    return made


X = {"x": torch.empty(2, 3, device="meta")}


def test_events_are_in_the_order_in_which_they_happened():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 3, device="meta")

        def forward(self, x):
            y = self.linear(x)
            y.register_hook(lambda grad: grad)
            return torch.tensor([2.0, 3.0]).sum() * y

    seen = names_of(record_tape(Twice(), X))
    linear = seen.index("enter linear"), seen.index("leave linear")
    assert (seen[0], seen[-1]) == ("enter ", "leave ")
    assert linear[0] < seen.index("addmm.default") < linear[1] < seen.index("hook")
    assert seen.index("hook") < seen.index("given [2.0, 3.0]") < seen.index("mul.Tensor")


def test_containers_are_told_as_they_were_when_a_call_began():
    class Appends(nn.Module):
        def forward(self, x, held):
            held.append(x + 1)
            return x

    class Root(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Appends()

        def forward(self, x):
            held = [x]
            return self.inner(x, held), held[1]

    _, inner = record_tape(Root(), X).calls()
    assert [len(inner.args[1])] == [1]


@pytest.mark.parametrize(
    "change", [lambda x: x.t_(), lambda x: x.unsqueeze_(0), lambda x: x.resize_(2), lambda x: x.squeeze_().t_()]
)
def test_a_tensor_that_is_reshaped_in_place_had_its_shape_until_then(change):
    shapes = []

    class Shapes(TapeReader):
        def operation(self, operation):
            told = (operation.operands, operation.outputs)
            shapes.append([[tuple(tensor.shape) for tensor in tensors] for tensors in told])

    def forward(x):
        y = x * 2
        change(y)
        return y + 1

    tape = record_tape(module(forward), X)
    tape.read(Shapes())
    assert shapes[0] == [[(2, 3)], [(2, 3)]]  # the product
    assert shapes[1][0][0] == (2, 3)  # what the change was made of
    assert shapes[-1][0][0] == shapes[-2][1][0] == tuple(tape.output.shape)


def test_an_input_that_is_reshaped_in_place_is_told_as_it_was():
    tape = record_tape(module(lambda x: x.unsqueeze_(0) * 2), {"x": torch.empty(2, 3, device="meta")})
    assert tape.inputs["x"].shape == (2, 3)
    assert tape.output.shape == (1, 2, 3)


def test_what_a_forward_does_to_what_it_holds_is_told():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("steps", torch.zeros((), device="meta"))
            self.register_buffer("mean", torch.zeros(3, device="meta"))
            self.register_buffer("table", torch.zeros(3, device="meta"))

        def forward(self, x):
            self.steps.add_(1)
            self.mean = self.mean * 0.9 + x.mean(0)
            return x + self.table

    tape = record_tape(Counts(), X)
    assert tape.rewritten == {"steps"}
    assert tape.replaced_buffers == {"mean"}


def test_a_forward_that_fails_is_refused_where_it_fails():
    class Root(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = module(lambda x: x.view(7))

        def forward(self, x):
            return self.inner(x)

    with pytest.raises(ScheduleError, match="trial call on the meta device") as raised:
        record_tape(Root(), X)
    assert raised.value.problems[0].module == "inner"


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn, self.mlp = nn.Linear(4, 4), nn.Identity()

    def forward(self, x, mask):
        return x + self.attn(x) + self.mlp(x) * mask


class Toy(nn.Module):
    main_input_name = "input_ids"

    def __init__(self, draws=False):
        super().__init__()
        self.draws = draws
        self.embed, self.head = nn.Embedding(9, 4), nn.Linear(4, 9)
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, input_ids, labels=None):
        x, mask = self.embed(input_ids), torch.ones(4)
        for layer in self.layers:
            if not self.draws or random.random() >= 0:
                x = layer(x, mask)
        return CausalLMOutput(logits=self.head(x))


def toy(**options):
    with torch.device("meta"):
        model = Toy(**options)
    return record_definition(meta_copy(model), find_layer_stack(model))


def test_tensors_are_other_ones_in_layers_and_in_what_these_call():
    calls = {call.path: call for call in toy().calls()}
    layer, attn, mlp = (calls[f"layers.0{name}"] for name in ("", ".attn", ".mlp"))
    assert [source is alias for source, alias in layer.entered] == [False, False]
    assert layer.args[0] is layer.entered[0].alias
    # One alias a call, and one of them for each tensor.
    assert attn.entered[0].source is mlp.entered[0].source is layer.args[0]
    assert attn.args[0] is not mlp.args[0]
    # What an Identity returns is what it was handed; whoever called it got another one.
    assert mlp.output is mlp.args[0]
    assert mlp.returned is mlp.exited[0].alias
    assert layer.returned is layer.output  # the last one's hidden state leaves the layers
    last = calls["layers.1"]
    assert last.returned is not last.output
    assert last.exited[0].source is last.output
    assert calls["embed"].returned is calls["embed"].output


@pytest.mark.parametrize("draws", [True, False])
def test_random_numbers_of_python_are_told_around_layers(draws):
    calls = {call.path: call for call in toy(draws=draws).calls()}
    assert calls["layers.0"].drew_before is calls["layers.1"].drew_before is draws
    assert not any(calls[path].drew_before for path in ("embed", "layers.0.attn", "head"))
