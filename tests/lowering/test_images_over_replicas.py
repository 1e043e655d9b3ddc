"""TorchVision's models at TP 2 x DP 2: one process's outputs, gradients and running statistics, and five steps."""

import pytest
import torch

from megasched.verify.ranks.pool import init_megatron
from tests.lowering.images import MODELS, chain, pictures, smooth
from tests.lowering.parity import compare_gradients, distance, scheduled_copy, too_far, weighted_loss
from tests.lowering.test_images import output_of, running
from tests.parity.cases import spread

REPLICAS = 2
TOLERANCES = {torch.float32: 1e-5, torch.float64: 1e-9}


def synchronized(fill):
    def filled(sch):
        fill(sch)
        if any("BatchNorm" in type(module).__name__ for module in sch.mod.modules()):
            sch.sync_batch_norm()

    return filled


def losses_of(built, model, x, group):
    """The loss of the whole batch, and that of a rank's part of it, made so that their mean is the former."""
    whole = output_of(model, x)
    rank = group.rank()
    weights = torch.linspace(0.5, 1.5, whole.numel(), dtype=x.dtype).view(whole.shape)
    own = output_of(built, x.chunk(REPLICAS)[rank])
    outputs = distance(own, whole.chunk(REPLICAS)[rank])
    return (whole * whole * weights).mean(), (own * own * weights.chunk(REPLICAS)[rank]).mean(), outputs


def average(tensors, group):
    for tensor in tensors:
        torch.distributed.all_reduce(tensor, group=group)
        tensor /= REPLICAS


def _first_step(name, dtype, tolerance):
    init_megatron(tp=2)
    from megatron.core import parallel_state

    group = parallel_state.get_data_parallel_group()
    made, fill, side = MODELS[name]
    torch.manual_seed(0)
    model = smooth(made()) if dtype == torch.float32 else made()
    model, x = model.to(dtype).train(), pictures(side, dtype)
    built, plan, _ = scheduled_copy(model, synchronized(fill), {next(iter(_names(model))): x})
    whole, own, outputs = losses_of(built, model, x, group)
    whole.backward()
    own.backward()
    average([parameter.grad for parameter in built.parameters()], group)
    mean = own.detach().clone()
    average([mean], group)
    found = {**compare_gradients(built, plan, model), **running(built, plan, model)}
    return too_far({**found, "output": outputs, "loss": distance(mean, whole.detach())}, tolerance)


def _names(model):
    import inspect

    return inspect.signature(model.forward).parameters


@pytest.mark.parametrize(
    ("name", "dtype"), spread(["resnet", "vit", "deeplab", "wide resnet"], [torch.float32, torch.float64])
)
def test_the_first_step_is_that_of_one_process(ranks, name, dtype):
    assert ranks.run(4, _first_step, name, dtype, TOLERANCES[dtype]) == [{}] * 4


def _five_steps():
    """Losses, weights and running statistics after five steps of AdamW in float64."""
    init_megatron(tp=2)
    from megatron.core import parallel_state

    group = parallel_state.get_data_parallel_group()
    made, fill, side = MODELS["resnet"]
    torch.manual_seed(0)
    model = made().train().double()
    built, plan, _ = scheduled_copy(model, synchronized(fill), {"x": pictures(side, torch.float64)})
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-3) for each in (model, built)]
    gaps = []
    for step in range(5):
        whole, own, _ = losses_of(built, model, pictures(side, torch.float64, step), group)
        whole.backward()
        own.backward()
        average([parameter.grad for parameter in built.parameters()], group)
        mean = own.detach().clone()
        average([mean], group)
        gaps.append(distance(mean, whole.detach()))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for each in (built, model):
        for parameter in each.parameters():
            parameter.grad = parameter.detach()
    return gaps, too_far({**compare_gradients(built, plan, model), **running(built, plan, model)}, 1e-9)


def test_five_steps_are_those_of_one_process(ranks):
    for gaps, weights in ranks.run(4, _five_steps):
        assert max(gaps) < 1e-9
        assert weights == {}


class Moments(torch.nn.BatchNorm1d):
    """Another class, and the same code."""


def _uneven():
    """Three samples and one, three of four kinds of batch norm; a rank's own statistics without the call."""
    init_megatron(tp=1)
    rank = torch.distributed.get_rank()
    x = torch.randn(4, 6, 5, generator=torch.Generator().manual_seed(3))
    own = x[:3] if rank == 0 else x[3:]
    found = []
    for asked in (True, False):
        model = chain(
            plain=Moments(6),
            cumulative=torch.nn.BatchNorm1d(6, momentum=None),
            bare=torch.nn.BatchNorm1d(6, affine=False, track_running_stats=False),
        )
        built, _, _ = scheduled_copy(model, lambda sch, asked=asked: asked and sch.sync_batch_norm())
        for _ in range(2):
            want, got = model(x), built(own)
        same = distance(got, want[:3] if rank == 0 else want[3:]) < 1e-5
        statistics = max(
            distance(a.double(), b.double(), 1e-2) for a, b in zip(built.buffers(), model.buffers(), strict=True)
        )
        found.append((same, statistics < 1e-5))
        weighted_loss(got).backward()
    return found


def _without_samples():
    init_megatron(tp=1)
    x = torch.randn(4, 6, 5, generator=torch.Generator().manual_seed(3))
    model = torch.nn.BatchNorm1d(6)
    built, _, _ = scheduled_copy(model, lambda sch: sch.sync_batch_norm())
    want, got = model(x), built(x if torch.distributed.get_rank() == 0 else x[:0])
    for output in (want, got):
        output.square().sum().backward()
    average([built.weight.grad], torch.distributed.group.WORLD)
    gradient = distance(REPLICAS * built.weight.grad, model.weight.grad)
    statistics = max(
        distance(a.double(), b.double(), 1e-2) for a, b in zip(built.buffers(), model.buffers(), strict=True)
    )
    return len(got), max(gradient, statistics) < 1e-5


def test_a_rank_may_have_no_samples(ranks):
    assert ranks.run(2, _without_samples) == [(4, True), (0, True)]


def test_ranks_may_have_different_numbers_of_samples(ranks):
    assert ranks.run(2, _uneven) == [[(True, True), (False, False)]] * 2
