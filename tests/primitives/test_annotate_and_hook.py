"""Annotate: an attribute that stays with its parameter. Hook: on the lowered module."""

import pytest
import torch
from torch import nn

import megasched
from megasched import ParallelDims, ScheduleError
from megasched.language import registry
from megasched.verify.ranks.pool import init_megatron
from tests.lowering.models import Mlp, randomize

X = torch.linspace(-1, 1, 32).reshape(4, 8)


def build(model, fill, **arguments):
    sch = megasched.create_schedule(model)
    fill(sch)
    return megasched.build(sch, **arguments)


def test_annotated_parameters():
    model = build(Mlp(), lambda sch: sch["*"][0].annotate("weight", "kind", {"of": "up"}))
    assert model.up.weight.kind == {"of": "up"}
    assert not hasattr(model.up.bias, "kind")


def test_a_parameter_that_does_not_exist():
    with pytest.raises(ScheduleError) as raised:
        build(Mlp(), lambda sch: [sch["up"].annotate("kernel", "a", 1), sch["act"].annotate("weight", "a", 1)])
    assert [(p.module, p.what, p.remedy) for p in raised.value.problems] == [
        ("up", "Linear has no parameter 'kernel'", "its parameters are: weight, bias"),
        ("act", "GELU has no parameter 'weight'", "it has no parameters of its own"),
    ]


CALLS = {
    "checkpoint": lambda node: node.checkpoint(),
    "fork_rng": lambda node: node.fork_rng(),
    "hook": lambda node: node.hook("fw_post", lambda module, inputs, output: None),
    "probe": lambda node: node.probe(),
    "sync": lambda node: node.sync("fwd_post", "all_reduce"),
}


class Listed(nn.Module):
    """Holds modules in containers, and calls those in them."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Mlp(), Mlp()])
        self.named = nn.ModuleDict({"a": Mlp()})
        self.in_turn = nn.Sequential(Mlp())

    def forward(self, x):
        for layer in (*self.layers, *self.named.values()):
            x = layer(x)
        return self.in_turn(x)


@pytest.mark.parametrize("name", CALLS)
def test_a_call_on_a_module_that_nobody_calls(name):
    """A list of layers has no forward: what is asked of its calls would never happen."""
    primitive = registry.get_primitive(name)
    assert primitive.acts_on_calls
    with pytest.raises(ScheduleError) as raised:
        build(
            Listed(), lambda sch: [CALLS[name](sch[path]) for path in ("layers", "named", "in_turn", "layers.*")]
        )
    assert [(p.module, p.what, p.remedy) for p in raised.value.problems] == [
        (
            path,
            f"{name}: {kind} has no forward, so that nothing would come of it",
            f'call it on what is in it, e.g. sch["{path}.*"].{name}(...)',
        )
        for path, kind in [("layers", "ModuleList"), ("named", "ModuleDict")]
    ]


def test_each_primitive_that_acts_on_calls_is_looked_at():
    named = registry.list_primitives(name_only=True)
    assert {name for name in named if registry.get_primitive(name).acts_on_calls} == CALLS.keys()


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.mlp = Mlp()
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.mlp(self.embed(ids)))


def _survives():
    init_megatron(tp=2)
    model = randomize(Tied())
    model.mlp.up.weight.own = "mine"

    def fill(sch):
        sch["head"].annotate("weight", "tied", True)
        sch["mlp.up"].annotate("weight", "early", 1)
        sch["mlp.up"].replace(lambda old: nn.Linear(8, 16))
        sch["mlp.up"].shard("weight", axis=0).annotate("bias", "late", 2)
        sch["mlp.down"].shard("weight", axis=1).annotate("bias", "whole", 3)
        sch["embed"].shard("weight", axis=0)
        sch["head"].shard("weight", axis=0)

    ids = torch.arange(10).reshape(2, 5)
    build(model, fill, inputs={"ids": ids})
    names = ("tied", "early", "late", "whole", "own", "tensor_model_parallel")
    return {
        path: {name: getattr(p, name) for name in names if hasattr(p, name)}
        for path, p in model.named_parameters()
    }


def test_annotations_survive_shard_and_replace(ranks):
    for found in ranks.run(2, _survives):
        assert found == {
            "embed.weight": {"tied": True, "tensor_model_parallel": True},
            "mlp.up.weight": {"early": 1, "own": "mine", "tensor_model_parallel": True},
            "mlp.up.bias": {"late": 2, "tensor_model_parallel": True},
            "mlp.down.weight": {"tensor_model_parallel": True},
            "mlp.down.bias": {"whole": 3},
        }


def test_hook_modes():
    calls = []

    def double(module, args):
        calls.append("fw_pre")
        return (2 * args[0],)

    def negate(module, args, output):
        calls.append("fw_post")
        return -output

    def halve(module, grad_input, grad_output):
        calls.append("bw_post")
        return (grad_input[0] / 2,)

    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 4, bias=False))
    first, second = (m.weight.detach().clone() for m in model)

    def fill(sch):
        sch["1"].hook("fw_pre", double).hook("fw_post", negate).hook("bw_post", halve)

    build(model, fill)
    output = model(X)
    output.sum().backward()
    assert calls == ["fw_pre", "fw_post", "bw_post"]
    assert torch.allclose(output, -2 * X @ first.T @ second.T, rtol=1e-5, atol=1e-6)
    # of the input as the module got it from fw_pre: -1 for the sign, halved; then the doubling's own 2
    upstream = -second.sum(0).expand(4, 8) / 2 * 2
    assert torch.allclose(model[0].weight.grad, upstream.T @ X, rtol=1e-5, atol=1e-6)


def test_an_unknown_mode():
    with pytest.raises(ScheduleError) as raised:
        build(Mlp(), lambda sch: sch["up"].hook("forward", print))
    (problem,) = raised.value.problems
    assert (problem.what, problem.remedy) == ("no hook mode 'forward'", "one of fw_pre, fw_post, bw_post")


def test_records_are_carried_out_in_the_order_of_the_calls():
    calls = []

    def say(word):
        return lambda *args: calls.append(word)

    def fill(sch):
        sch["up"].hook("fw_pre", say("first"))
        sch["down"].hook("fw_pre", say("third"))
        sch["up"].hook("fw_pre", say("second"))

    build(Mlp(), fill)(X)
    assert calls == ["first", "second", "third"]


def _on_lowered_modules():
    """Hooks asked for and hooks that the module had, on column, row and embedding."""
    init_megatron(tp=2)
    model = randomize(Tied())
    calls = []
    for name in ("embed", "head"):
        model.get_submodule(name).register_forward_hook(
            lambda m, args, output: calls.append(("had", type(m).__name__))
        )
    model.mlp.up.register_full_backward_hook(lambda m, *grads: calls.append(("had back", type(m).__name__)))

    def fill(sch):
        sch["embed"].shard("weight", axis=0)
        sch["head"].shard("weight", axis=0)
        sch["mlp.up"].shard("weight", axis=0)
        sch["mlp.down"].shard("weight", axis=1)
        sch["mlp.*"][0].hook("fw_post", lambda m, args, output: calls.append(("asked", tuple(output.shape))))
        sch["mlp.down"].hook("fw_pre", lambda m, args: calls.append(("asked", tuple(args[0].shape))))

    ids = torch.arange(10).reshape(2, 5)
    build(model, fill, inputs={"ids": ids})
    calls.clear()  # the trial call ran the model's own hooks on its copy
    model(ids).sum().backward()
    return calls


def test_on_lowered_modules(ranks):
    for found in ranks.run(2, _on_lowered_modules):
        assert found == [
            ("had", "VocabEmbedding"),
            ("asked", (2, 5, 16)),  # gathered: a hook is handed whole gradients
            ("asked", (2, 5, 16)),
            ("had", "ColumnLinear"),
            ("had back", "ColumnLinear"),
        ]


def test_a_schedule_for_more_ranks_than_there_are_is_refused():
    sch = megasched.create_schedule(Mlp(), ParallelDims(tensor_model_parallel_size=2))
    with pytest.raises(
        ScheduleError, match="the schedule is for TP 2, and this process stands in a TP group of 1"
    ):
        megasched.build(sch)
