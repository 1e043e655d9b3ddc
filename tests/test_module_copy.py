"""Copies of modules have their own of all that functions on them hold."""

import threading
from functools import partial
from types import MethodType

import pytest
import torch
from torch import nn

from megasched.analysis.recording.meta_call import meta_copy
from megasched.definition.module_copy import copy_module, holds_tensor
from megasched.errors import ScheduleError


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.linear = nn.Linear(4, 1), nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x)


def scaled(scale, module, args, output):
    return output * scale.weight


def closed(scale):
    return lambda module, args, output: output * scale.weight


def hooked_by_default(model):
    def hook(module, args, output, scale=model.scale):
        return output * scale.weight

    model.linear.register_forward_hook(hook)


def forward_replaced(model):
    before = model.linear.forward

    def forward(x, before=before):
        return before(x) * model.scale.weight

    model.linear.forward = forward


def forward_bound(model):
    def forward(linear, x, scale=model.scale):
        return nn.Linear.forward(linear, x) * scale.weight

    model.linear.forward = MethodType(forward, model.linear)


def listed(model):
    held = [model.scale]
    model.linear.held = held
    model.linear.register_forward_hook(lambda module, args, output: output * held[0].weight)


WAYS = {
    "closure": lambda m: m.linear.register_forward_hook(closed(m.scale)),
    "partial": lambda m: m.linear.register_forward_hook(partial(scaled, m.scale)),
    "default": hooked_by_default,
    "forward": forward_replaced,
    "bound": forward_bound,
    "list": listed,
}


def made(way):
    torch.manual_seed(0)
    model = Model()
    way(model)
    return model


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_copy_runs_its_own_weights(way):
    model, x = made(way), torch.randn(2, 4)
    before = model(x)
    copied = copy_module(model)
    assert torch.equal(copied(x), before)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
    assert torch.count_nonzero(copied(x)) == 0
    assert torch.equal(model(x), before)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_copy_on_meta_is_on_meta(way):
    assert meta_copy(made(way))(torch.empty(2, 4, device="meta")).is_meta


def test_what_functions_share_is_shared_in_the_copy():
    model, count = Model(), 0

    def counted(module, args, output):
        nonlocal count
        count += 1

    def asked():
        return count

    model.linear.register_forward_hook(counted)
    model.asked = asked
    copied = copy_module(model)
    copied(torch.zeros(1, 4))
    assert (model.asked(), copied.asked()) == (0, 1)


def test_what_a_module_has_is_what_its_hook_has():
    model, box = Model(), []
    model.box = box
    model.register_forward_pre_hook(lambda module, args: box.append(1))
    copied = copy_module(model)
    copied(torch.zeros(1, 4))
    assert (model.box, copied.box) == ([], [1])


def test_a_weight_that_a_hook_makes():
    linear = torch.nn.utils.weight_norm(nn.Linear(4, 4))
    linear(torch.zeros(1, 4))
    copied = copy_module(nn.Sequential(linear))
    x = torch.randn(2, 4)
    assert torch.equal(copied(x), linear(x))


HOLDS = {
    "a closure": lambda m: m.linear.register_forward_hook(
        (lambda w: lambda a, b, output: output * w)(m.scale.weight)
    ),
    "a partial": lambda m: m.linear.register_forward_hook(partial(scaled, m.scale.weight)),
    "a list": lambda m: setattr(m.linear, "of", (lambda held: lambda: held)([m.scale.weight])),
}


@pytest.mark.parametrize("way", HOLDS.values(), ids=HOLDS)
def test_a_function_that_holds_a_tensor_of_the_model_is_found(way):
    assert holds_tensor(made(way)) == "linear"


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_one_that_holds_a_module_is_none(way):
    assert holds_tensor(made(way)) is None


class Reset(Model):
    """Says how it is copied, and HF never copies it."""

    factor = 1.0

    def __deepcopy__(self, memo):
        return Reset()

    def __setstate__(self, state):
        super().__setstate__(state)
        self.factor = 0.5

    def forward(self, x):
        return self.linear(x) * self.factor


def test_what_an_own_class_says_of_copies_is_left_aside():
    model, x = nn.Sequential(Reset()), torch.ones(2, 4)
    copied = copy_module(model)
    assert torch.equal(copied(x), model(x))
    assert copied[0].linear.weight is not model[0].linear.weight


def test_torchs_classes_are_copied_as_they_say():
    model = nn.Sequential(nn.GRU(4, 4), nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)))
    copied = copy_module(model)
    assert copied[0]._flat_weights[0] is copied[0].weight_ih_l0 is not model[0].weight_ih_l0
    assert torch.equal(copied[1].weight, model[1].weight)


def test_what_cannot_be_copied_is_refused():
    model = Model()
    model.lock = threading.Lock()
    with pytest.raises(ScheduleError, match="it holds a lock that can't be copied"):
        copy_module(model)
