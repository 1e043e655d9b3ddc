"""Convolutions and batch norms that are cut: outputs, every gradient and running statistics of the whole model."""

import copy

import pytest
import torch
from torch import nn

import megasched
from megasched import ParallelDims, ScheduleError
from megasched.verify.ranks.pool import init_megatron
from tests.lowering.images import CHAINS, MODELS, chain, ends, pictures, resnet, smooth
from tests.lowering.models import randomize
from tests.lowering.parity import compare_gradients, distance, scheduled_copy, too_far, weighted_loss


def output_of(model, x):
    found = model(x)
    return found["out"] if isinstance(found, dict) else found


def running(built, plan, model):
    """Name -> distance of the whole running statistics."""
    from megatron.core import parallel_state

    group, found = parallel_state.get_tensor_model_parallel_group(), {}
    for name, whole in model.named_buffers():
        every = [None] * group.size()
        torch.distributed.all_gather_object(every, built.get_buffer(name), group=group)
        got = plan.placements[name].unshard(every) if name in plan.placements else every[0]
        found[name] = distance(got.double(), whole.double(), 1e-2)
    return found


def _compared(made, fill, x):
    """Distances of everything after one step forward and backward, in training and then in evaluation."""
    torch.manual_seed(0)
    model = made().train()
    built, plan, _ = scheduled_copy(model, fill, {next(iter(_names(model))): x})
    outputs = [output_of(each, x) for each in (built, model)]
    for output in outputs:
        weighted_loss(output).backward()
    found = {**compare_gradients(built, plan, model), **running(built, plan, model)}
    evaluated = [output_of(each.eval(), x).detach() for each in (built, model)]
    return plan, {**found, "output": distance(*outputs), "evaluated": distance(*evaluated)}


def _names(model):
    import inspect

    return inspect.signature(model.forward).parameters


def _model(name):
    init_megatron(tp=2)
    made, fill, side = MODELS[name]
    plan, found = _compared(lambda: smooth(made()), fill, pictures(side))
    cut = sum(placement.sharded for placement in plan.placements.values())
    return sorted(plan.tp_facts.gather), cut, too_far(found)


@pytest.mark.parametrize(
    ("name", "gathered", "cut"),
    [
        ("resnet", 0, 4 * (1 + 4 + 1)),
        ("wide resnet", 0, 4 * (1 + 4 + 1)),
        ("vit", 1, 2 + 2 * 3),
        ("deeplab", 0, 4 * 6 + 4 * 5 + 1 + 5 + 1),
        ("densenet", 2, 27),
        ("mobilenet", 0, 2 * (5 + 5 + 1 + 2 + 1)),
    ],
)
def test_a_model_of_torchvision(ranks, name, gathered, cut):
    for found in ranks.run(2, _model, name):
        assert (len(found[0]), found[1:]) == (gathered, (cut, {})), found[0]


def _chains():
    init_megatron(tp=2)
    found = {}
    for name, (made, fill, shape, gathered) in CHAINS.items():
        x = torch.randn(shape, generator=torch.Generator().manual_seed(3))
        plan, gaps = _compared(lambda made=made: randomize(made()), fill, x)
        found[name] = (set(plan.tp_facts.gather) == gathered, set(plan.left_whole), too_far(gaps))
    return found


def test_what_stands_between_two_cuts(ranks):
    for found in ranks.run(2, _chains):
        assert found == dict.fromkeys(CHAINS, (True, set(), {}))


HELD = [f"norm.{name}" for name in ("weight", "bias", "running_mean", "running_var")]


def _buffers():
    """What a rank holds of a batch norm, in the state dict too; its class, hooks and sizes stay."""
    init_megatron(tp=2)
    rank = torch.distributed.get_rank()
    model = randomize(chain(up=nn.Conv2d(4, 8, 1), norm=nn.BatchNorm2d(8), down=nn.Conv2d(8, 4, 1)))
    model.norm.running_mean.copy_(torch.arange(8.0))
    whole = copy.deepcopy(model.state_dict())
    built, plan, _ = scheduled_copy(model, ends, {"input": torch.zeros(2, 4, 3, 3)})
    own = built.state_dict()
    names = [name for name in own if name in plan.placements and plan.placements[name].sharded]
    return (
        list(own) == list(whole),
        sorted(names),
        all(torch.equal(own[name], plan.placements[name].shard(whole[name], rank, 2)) for name in names),
        own["norm.running_mean"].tolist(),
        [type(module).__name__ for module in built],
        (built.norm.num_features, built.up.out_channels),
        {name: built.get_parameter(name).requires_grad for name in ("norm.weight", "up.bias")},
    )


def test_a_batch_norm_holds_its_channels(ranks):
    for rank, found in enumerate(ranks.run(2, _buffers)):
        assert found == (
            True,
            sorted(("up.weight", "up.bias", "down.weight", *HELD)),
            True,
            [4.0 * rank + channel for channel in range(4)],
            ["Conv2d", "BatchNorm2d", "Conv2d"],
            (8, 8),
            {"norm.weight": True, "up.bias": True},
        )


class Standardized(nn.Conv2d):
    def forward(self, x):
        return self._conv_forward(x, self.weight - self.weight.mean(), self.bias)


class ReadElsewhere(nn.Module):
    """Its batch norm's weight is read by other code: it stays whole, and what it takes is gathered."""

    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Conv2d(4, 8, 1), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 1)

    def forward(self, input):
        return self.down(self.norm(self.up(input))) + self.norm.weight.mean()


REFUSED = {
    "a place of the kernel": (lambda sch: sch["up"].shard("weight", axis=2), "that is a place of the kernel"),
    "inputs of groups": (lambda sch: sch["wide"].shard("weight", axis=1), "each of its 4 groups adds up its own"),
    "whole groups": (lambda sch: sch["wide"].shard("weight", axis=0), "what it takes is whole on every rank"),
    "whole channels": (lambda sch: sch["norm"].shard("running_mean", axis=0), "what it takes is whole on every"),
    "a bias alone": (lambda sch: sch["up"].shard("bias", axis=0), "the bias follows"),
    "components": (lambda sch: sch["up"].shard("weight", axis=0, components=(4, 4)), "leave components out"),
    "an odd number": (lambda sch: sch["odd"].shard("weight", axis=0), "TP 2 does not divide weight"),
    "own code": (lambda sch: sch["own"].shard("weight", axis=0), "Standardized.weight can't be sharded"),
    "nothing to share": (lambda sch: sch["up"].sync_batch_norm(), "there is no batch norm in it"),
    "a batch norm of others": (lambda sch: sch.sync_batch_norm(), "leave convert_sync_batchnorm out"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    fill, words = REFUSED[name]
    others = {"theirs": nn.SyncBatchNorm(8)} if "of others" in name else {}
    model = chain(
        up=nn.Conv2d(4, 8, 1),
        norm=nn.BatchNorm2d(8),
        wide=nn.Conv2d(8, 8, 1, groups=4),
        odd=nn.Conv2d(8, 7, 1),
        own=Standardized(7, 8, 1),
        **others,
    )
    sch = megasched.create_schedule(model, ParallelDims(tensor_model_parallel_size=2))
    fill(sch)
    with pytest.raises(ScheduleError, match=words):
        _plan(sch, model)


def _plan(sch, model, inputs=True):
    from megasched.plan.make import make_plan

    return make_plan(sch, model=model, inputs={"input": torch.zeros(2, 4, 3, 3)} if inputs else None)


def test_without_inputs_nothing_tells_what_channels_meet():
    model = chain(up=nn.Conv2d(4, 8, 1), norm=nn.BatchNorm2d(8), down=nn.Conv2d(8, 4, 1))
    sch = megasched.create_schedule(model, ParallelDims(tensor_model_parallel_size=2))
    ends(sch)
    with pytest.raises(ScheduleError, match="nothing tells what its channels meet"):
        _plan(sch, model, inputs=False)


def test_a_batch_norm_that_other_code_reads_stays_whole():
    model = ReadElsewhere()
    sch = megasched.create_schedule(model, ParallelDims(tensor_model_parallel_size=2))
    ends(sch)
    plan = _plan(sch, model)
    assert "norm" not in plan.cuts
    assert not plan.placements["norm.weight"].sharded
    assert "up" in plan.tp_facts.gather


def test_at_one_rank_nothing_is_cut():
    model = resnet()
    x = pictures(64)
    want = copy.deepcopy(model)(x)
    sch = megasched.create_schedule(model)
    sch["layer*.*.conv2"].shard("weight", axis=0)
    sch.sync_batch_norm()
    assert torch.equal(megasched.build(sch, inputs={"x": x})(x), want)
