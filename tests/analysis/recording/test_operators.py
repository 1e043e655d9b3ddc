"""What operations say of themselves."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megasched.analysis.recording.operators import draws, written


class Watch(TorchDispatchMode):
    """Remembers which operations draw, and which tensors are changed."""

    def __init__(self):
        super().__init__()
        self.drawing, self.changed = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if draws(func, args, kwargs or {}):
            self.drawing.append(func.overloadpacket.__name__)
        self.changed += written(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def watched(call):
    x = torch.zeros(4, 4, device="meta")
    with torch.no_grad(), Watch() as watch:
        call(x)
    return watch, x


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x.exponential_(),
        lambda x: x.geometric_(0.5),
        lambda x: x.cauchy_(),
        lambda x: x.random_(),
        lambda x: x.bernoulli(),
        lambda x: x.multinomial(2),
        lambda x: torch.normal(x, 1.0),
        lambda x: torch.poisson(x),
        lambda x: torch.rand_like(x),
        lambda x: torch.randperm(4, device="meta"),
        lambda x: torch.nn.functional.rrelu(x, training=True),
        lambda x: torch.nn.functional.dropout(x, 0.5, True),
        lambda x: torch.nn.functional.gumbel_softmax(x),
    ],
)
def test_what_draws_is_seen_whatever_its_name(call):
    assert watched(call)[0].drawing


@pytest.mark.parametrize(
    "call",
    [
        lambda x: torch.nn.functional.rrelu(x, training=False),
        lambda x: torch.nn.functional.dropout(x, 0.5, False),
        lambda x: torch.nn.functional.scaled_dot_product_attention(x[None], x[None], x[None]),
        lambda x: x.exp().softmax(-1),
    ],
)
def test_what_could_draw_and_does_not_is_no_such_thing(call):
    assert watched(call)[0].drawing == []


def test_what_is_changed_in_place():
    watch, x = watched(lambda x: x.exp_())
    assert watch.changed[0] is x
    assert watched(lambda x: x.exp())[0].changed == []
    found = watched(lambda x: torch._foreach_add_([x, x[0]], 1.0))[0].changed
    assert [tuple(tensor.shape) for tensor in found] == [(4, 4), (4,)]
    out = watched(lambda x: torch.exp(x, out=torch.empty(4, 4, device="meta")))[0].changed
    assert [tuple(tensor.shape) for tensor in out] == [(4, 4)]
