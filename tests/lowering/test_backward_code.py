"""What a definition's own code does to gradients, and to weights that are cut, is done to whole ones."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from megasched.analysis.rules.function_trials import FunctionTrials
from megasched.errors import ScheduleError
from megasched.language.parallel_dims import ParallelDims
from megasched.language.schedule import create_schedule
from megasched.language.tensor_types import ShardDim
from megasched.plan.make import make_plan
from megasched.verify.ranks.pool import init_megatron
from tests.language.sharding import column_row
from tests.lowering.models import Mlp, randomize
from tests.lowering.parity import compare, scheduled_copy, too_far


class Scaled(torch.autograd.Function):
    """Elementwise both ways, though the backward is another function's: a straight-through estimator."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.round()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * (x.abs() < 1)


class Root(torch.autograd.Function):
    """Of positive numbers alone."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sqrt()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad / x.clip(min=1e-6).sqrt() / 2


class Normed(torch.autograd.Function):
    """The gradient of each token is divided by its norm."""

    @staticmethod
    def forward(x):
        return x * 2

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, grad):
        return grad / (grad.norm(dim=-1, keepdim=True) + 1e-3)


class NormedFromAnother(Scaled):
    """Has its forward from another one, and not its backward."""

    @staticmethod
    def backward(ctx, grad):
        return grad / (grad.norm(dim=-1, keepdim=True) + 1e-3)


class Weighted(torch.autograd.Function):
    """A weight with a gradient that is made by hand, a sum over all but the last dimension."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad * weight, (grad * x).flatten(0, -2).sum(0)


kept = Normed.apply  # as a definition may keep it


def normed_by_hook(h):
    if h.requires_grad:
        h.register_hook(lambda grad: grad / (grad.norm(dim=-1, keepdim=True) + 1e-3))
    return h


class Between(nn.Module):
    """Something is done between a column and its row: [b, s, 8] -> [b, s, 8]."""

    def __init__(self, between):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.between = between

    def forward(self, x):
        return self.down(self.between(self.up(x)))


def normed_by_hook_on_its_function(h):
    if h.requires_grad:
        h.grad_fn.register_prehook(lambda grads: (grads[0] / (grads[0].norm(dim=-1, keepdim=True) + 1e-3),))
    return h


def normed_by_hook_on_a_result(h):
    h = h * 1
    if h.requires_grad:
        node = torch.autograd.graph.get_gradient_edge(h).node
        node.register_hook(lambda into, out: tuple(None if g is None else g / (g.norm() + 1e-3) for g in into))
    return h


class Hooked(Between):
    """A module whose gradients a hook sees."""

    def __init__(self):
        super().__init__(nn.Tanh())
        self.between.register_full_backward_hook(lambda module, grad_input, grad_output: (grad_output[0] * 2,))


class Ternary(nn.Module):
    """BitNet by hand: a weight is scaled by its mean where it is used."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False)

    def forward(self, x):
        for linear in (self.up, self.down):
            scale = linear.weight.abs().mean()
            rounded = (linear.weight / scale).round().clamp(-1, 1) * scale
            x = F.linear(x, linear.weight + (rounded - linear.weight).detach())
        return x


class Penalized(Mlp):
    """A term that is made of a weight: only that one is read."""

    def forward(self, x):
        return super().forward(x) + self.up.weight.square().mean()


class Clipped(Mlp):
    """Weights are clipped in place, which is the same on a part."""

    def forward(self, x):
        self.down.weight.data.clamp_(-0.2, 0.2)
        return super().forward(x)


CASES = {
    # name: (model, whether the pair stays cut, which of them are left whole)
    "elementwise function": (lambda: Between(Scaled.apply), True, set()),
    "gradient normed by a function": (lambda: Between(Normed.apply), False, set()),
    "by a function with another's forward": (lambda: Between(NormedFromAnother.apply), False, set()),
    "by a reference that was kept": (lambda: Between(kept), False, set()),
    "by a hook": (lambda: Between(normed_by_hook), False, set()),
    "by a hook on its function": (lambda: Between(normed_by_hook_on_its_function), False, set()),
    "by a hook on a function after": (lambda: Between(normed_by_hook_on_a_result), False, set()),
    "by a module's hook": (Hooked, False, set()),
    "weights scaled by their means": (Ternary, True, {"up", "down"}),
    "a term of a weight": (Penalized, False, {"up"}),
    "weights clipped": (Clipped, True, set()),
}


def _compared():
    init_megatron(tp=2)
    x = {"x": torch.linspace(-1, 1, 2 * 3 * 8).reshape(2, 3, 8)}
    found = {}
    for name, (make, _, _) in CASES.items():
        _, plan, _ = scheduled_copy(randomize(make()), column_row, x)
        cut = not plan.tp_facts.gather and not plan.tp_facts.scatter
        found[name] = cut, set(plan.left_whole), too_far(compare(randomize(make()), column_row, x, x))
    return found


def test_at_tp2_output_and_every_gradient_are_the_unscheduled_models(ranks):
    want = {name: (cut, whole, {}) for name, (_, cut, whole) in CASES.items()}
    for found in ranks.run(2, _compared):
        assert found == want


def along(cuts):
    return lambda tensor: cuts.get(id(tensor))


@pytest.mark.parametrize(
    ("function", "dim", "works"),
    [(Scaled, 2, True), (Scaled, 1, True), (Root, 2, True), (Normed, 2, False), (Normed, 1, True)],
)
def test_a_function_is_tried_along_the_dimension_that_is_cut(function, dim, works):
    x, output = (torch.empty(2, 4, 8, device="meta") for _ in range(2))
    cuts = {id(x): ShardDim(dim), id(output): ShardDim(dim)}
    assert FunctionTrials().works_on_shards(function, (x,), output, along(cuts)) is works


def test_the_gradient_of_what_is_whole_adds_up():
    x, output = (torch.empty(2, 4, 8, device="meta") for _ in range(2))
    weight = torch.empty(8, device="meta")
    tokens = {id(x): ShardDim(1), id(output): ShardDim(1)}
    assert FunctionTrials().works_on_shards(Weighted, (x, weight), output, along(tokens))
    features = {id(x): ShardDim(2), id(output): ShardDim(2)}
    assert not FunctionTrials().works_on_shards(Weighted, (x, weight), output, along(features))
    features[id(weight)] = ShardDim(0)
    assert FunctionTrials().works_on_shards(Weighted, (x, weight), output, along(features))


def test_gradients_that_add_up_are_no_gradients_of_what_is_not_linear():
    x, output = (torch.empty(2, 4, 8, device="meta") for _ in range(2))
    assert FunctionTrials().works_on_shards(Scaled, (x,), output, along({}))
    assert not FunctionTrials().works_on_shards(Normed, (x,), output, along({}))


class Packing(Between):
    """Has what is saved for the backward pass rounded by its largest."""

    def forward(self, x):
        pack = lambda t: (t / t.abs().max() * 127).round() * t.abs().max() / 127  # noqa: E731
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            return super().forward(x)


class Recomputing(Between):
    """Torch's own hooks keep the values."""

    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=False)


def test_packs_of_saved_tensors_get_no_parts():
    layout = ParallelDims(tensor_model_parallel_size=2)
    x = {"x": torch.ones(2, 3, 8)}
    schedule = create_schedule(Packing(torch.tanh), layout)
    column_row(schedule)
    with pytest.raises(ScheduleError, match="its hooks on tensors that are saved for the backward pass"):
        make_plan(schedule, inputs=x)
    schedule = create_schedule(Recomputing(torch.tanh), layout)
    column_row(schedule)
    assert not make_plan(schedule, inputs=x).tp_facts.gather


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_on_parameters_are_refused_by_name(register):
    model = Mlp()
    getattr(model.up.weight, register)(lambda gradient: None)
    schedule = create_schedule(model, ParallelDims(tensor_model_parallel_size=2))
    column_row(schedule)
    with pytest.raises(ScheduleError, match="a hook on the gradient of its parameter weight") as refused:
        make_plan(schedule, inputs={"x": torch.ones(2, 3, 8)})
    assert refused.value.problems[0].module == "up"
    make_plan(create_schedule(model, ParallelDims()), inputs={"x": torch.ones(2, 3, 8)})
