"""Trials leave nothing in what a model's code keeps outside of its modules."""

import random
from collections import OrderedDict, defaultdict, deque
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import megasched
from megasched.definition.undisturbed import undisturbed


class State:
    """Holds losses, and itself."""

    def __init__(self):
        self.losses, self.calls, self.itself = [], 0, self


class Last(OrderedDict):
    """Moves what is read to its end."""

    def __getitem__(self, key):
        self.move_to_end(key)
        return super().__getitem__(key)


LOSSES = deque(maxlen=9)
BY_NAME = defaultdict(list)
NESTED = {"a": [({"losses": []},)]}
STATE = State()
SPACE = SimpleNamespace(losses=[])
LAST = Last(a=1, b=2)
DRAWS = random.Random(3)
COUNT = 0
SHARED = [STATE]


def record(loss):
    SPACE.losses.append(loss)


def in_a_deque(loss):
    LOSSES.append(loss)


def in_a_default(loss):
    BY_NAME["own"].append(loss)


def nested(loss):
    NESTED["a"][0][0]["losses"].append(loss)


def on_an_object(loss):
    SHARED[0].itself.calls += 1
    STATE.losses.append(loss)


def by_a_helper(loss):
    record(loss)


def in_an_order(loss):
    LAST["a"]
    LAST["c"] = loss


def of_a_generator(loss):
    DRAWS.random()


def in_a_name(loss):
    global COUNT
    COUNT += 1


def in_a_closure(seen=[]):  # noqa: B006
    kept = []
    return lambda loss: [kept.append(loss), seen.append(loss)]


CLOSURE = in_a_closure()


def enclosed(loss):
    CLOSURE(loss)


CODES = (
    *(in_a_deque, in_a_default, nested, on_an_object, by_a_helper, in_an_order, of_a_generator, in_a_name),
    enclosed,
)


class Code(nn.Module):
    def __init__(self, number):
        super().__init__()
        self.linear, self.number = nn.Linear(4, 4), number

    def forward(self, x):
        y = self.linear(x)
        CODES[self.number](y.square().mean())
        return y


def present():
    kept = [cell.cell_contents for cell in CLOSURE.__closure__]
    return (
        *(list(LOSSES), {name: list(value) for name, value in BY_NAME.items()}, list(NESTED["a"][0][0]["losses"])),
        *(list(STATE.losses), STATE.calls, list(SPACE.losses), list(LAST.items()), DRAWS.getstate(), COUNT),
        [list(one) for one in kept],
    )


@pytest.mark.parametrize("code", CODES)
def test_what_a_trial_leaves_is_taken_back(code):
    model, before = Code(CODES.index(code)), present()
    with undisturbed(model):
        model(torch.ones(2, 4))
        assert present() != before
    assert present() == before


@pytest.mark.parametrize("code", [in_a_deque, nested, on_an_object, by_a_helper])
def test_a_build_leaves_no_tensors(code):
    model, before = Code(CODES.index(code)), present()
    sch = megasched.create_schedule(model)
    sch["linear"].shard("weight", axis=0)
    megasched.build(sch, inputs={"x": torch.ones(2, 4)})
    assert present() == before


def test_what_was_there_is_there_again_by_identity():
    model, loss = Code(CODES.index(on_an_object)), torch.ones(())
    STATE.losses.append(loss)
    losses = STATE.losses
    try:
        with undisturbed(model):
            STATE.losses.clear()
            STATE.losses = []
        assert STATE.losses is losses
        assert len(losses) == 1
        assert losses[0] is loss
    finally:
        losses.clear()
