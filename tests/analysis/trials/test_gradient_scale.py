"""Code that goes by how large a gradient is: in each of several replicas it is larger than at one rank."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megasched.analysis.recording.recorder import record_tape
from megasched.analysis.trials.gradient_scale import why_by_scale
from megasched.verify.parity import LAYOUTS, CheckedLayout, failure
from megasched.verify.ranks.pool import RankError
from tests import remote
from tests.parity.steps import assert_equal, step_of_own_code
from tests.ways import mlp

INPUTS = {"x": torch.empty(1, 2, 4, device="meta")}


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        return -grad


class Clipped(Reversed):
    @staticmethod
    def backward(ctx, grad):
        return grad.clamp(-1, 1)


class Signed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sign()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * (x.abs() < 1)


class Model(nn.Module):
    def __init__(self, change):
        super().__init__()
        self.inner, self.change = nn.Linear(4, 4), change

    def forward(self, x):
        return self.change(self.inner(x))


def with_hook(hook):
    def change(x):
        x.register_hook(hook)
        return x

    return change


def by_grad_fn(x):
    x.grad_fn.register_prehook(lambda grads: grads)
    return x


def by_a_module(hook):
    model = Model(torch.tanh)
    model.inner.register_full_backward_hook(hook)
    return model


LINEAR = {
    "a function that turns gradients round": Model(Reversed.apply),
    "one with tensors that are saved": Model(Signed.apply),
    "a hook that scales": Model(with_hook(lambda grad: grad * 0.1)),
    "a hook that only looks": Model(with_hook(lambda grad: None)),
    "none": Model(torch.tanh),
}
OTHERS = {
    "a function that clips": (Model(Clipped.apply), "the backward of Clipped goes by how large"),
    "a hook that clips": (
        Model(with_hook(lambda grad: grad.clamp(-1, 1))),
        "a hook on a gradient goes by how large",
    ),
    "a hook that norms": (
        Model(with_hook(lambda grad: grad / grad.norm())),
        "a hook on a gradient goes by how large",
    ),
    "what grad_fn gets": (Model(by_grad_fn), "its code reads grad_fn"),
    "a module's hook": (by_a_module(lambda module, given, of: None), "its backward hooks are handed gradients"),
}


@pytest.mark.parametrize("model", LINEAR.values(), ids=LINEAR)
def test_what_is_linear_is_let_through(model):
    assert why_by_scale(record_tape(model.to("meta"), INPUTS)) is None


@pytest.mark.parametrize(("model", "why"), OTHERS.values(), ids=OTHERS)
def test_what_is_not_is_found(model, why):
    problem = why_by_scale(record_tape(model.to("meta"), INPUTS))
    assert problem.what.startswith(why)
    assert problem.remedy == "run it without DP and CP"
    assert problem.module in ("", "inner")


HOOK = "if h.requires_grad:\n    h.register_hook(lambda grad: {})"


def test_replicas_of_it_are_refused(ranks, tmp_path):
    layout = CheckedLayout(2, 1, "")
    with pytest.raises(RankError) as raised:
        step_of_own_code(
            ranks, remote.write(tmp_path / "one", mlp(HOOK.format("grad.clamp(-1e-4, 1e-4)"))), layout
        )
    outcome = failure(str(raised.value))
    assert outcome.verdict == "refused"
    assert (
        "goes by how large that is, and on each of several replicas it is larger than at one rank" in outcome.why
    )
    folder = remote.write(tmp_path / "other", mlp(HOOK.format("grad * 0.5")))
    assert_equal(step_of_own_code(ranks, folder, layout))
    folder = remote.write(tmp_path / "tp", mlp(HOOK.format("grad.clamp(-1e-4, 1e-4)")))
    assert_equal(step_of_own_code(ranks, folder, LAYOUTS["tp2"]))
