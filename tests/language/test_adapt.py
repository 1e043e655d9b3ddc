"""Adapt and unfreeze: what is added and what is trained, what is refused, and that TP changes no number."""

import pytest
import torch
from torch import nn

import megasched
from megasched import ParallelDims, ScheduleError
from megasched.model_adapters.default_schedule import schedule as auto
from megasched.model_adapters.registry import roles_of
from megasched.verify.ranks.pool import init_megatron
from tests.lowering.models import Mlp, randomize, tiny_model, token_ids
from tests.lowering.parity import distance, gathered_gradients, too_far

X = torch.linspace(-1, 1, 24).reshape(3, 8)


@pytest.fixture
def model():
    return nn.Sequential(randomize(Mlp()), nn.LayerNorm(8), randomize(Mlp(), seed=8))


def build(sch, fill):
    fill(sch)
    megasched.build(sch)


def refused(model, fill):
    """The problems; checks that the model is what it was, and that each names its line in this file."""
    before = {name: (id(p), p.requires_grad) for name, p in model.named_parameters()}
    sch = megasched.create_schedule(model, ParallelDims())
    with pytest.raises(ScheduleError) as raised:
        build(sch, fill)
    assert {name: (id(p), p.requires_grad) for name, p in model.named_parameters()} == before
    assert not any(module._forward_hooks for module in model.modules())
    assert all(__file__ in problem.source for problem in raised.value.problems)
    return [problem.what for problem in raised.value.problems]


def test_what_is_added_and_what_is_trained(model):
    want, weight = model(X), model[0].up.weight
    sch = megasched.create_schedule(model, ParallelDims())
    sch["*.up"].adapt(rank=4, alpha=8)
    sch["1"].unfreeze()
    megasched.build(sch)
    assert model[0].up.weight is weight
    assert torch.equal(model(X), want)  # B is zero
    model(X).sum().backward()
    trained = {name: list(p.shape) for name, p in model.named_parameters() if p.grad is not None}
    assert trained == {
        "0.up.lora_A.weight": [4, 8],
        "0.up.lora_B.weight": [16, 4],
        "1.weight": [8],
        "1.bias": [8],
        "2.up.lora_A.weight": [4, 8],
        "2.up.lora_B.weight": [16, 4],
    }
    assert trained.keys() == {name for name, p in model.named_parameters() if p.requires_grad}
    with torch.no_grad():
        nn.init.normal_(model[0].up.lora_B.weight)
    a, b = model[0].up.lora_A.weight, model[0].up.lora_B.weight
    torch.testing.assert_close(model[0].up(X), X @ (weight + 2 * b @ a).T + model[0].up.bias)


def test_scaling_of_rslora_and_alpha_of_default(model):
    sch = megasched.create_schedule(model, ParallelDims())
    sch["0.up"].adapt(rank=4, use_rslora=True)
    assert sch.records[0].arguments == {"rank": 4, "alpha": 4, "dropout": 0.0, "use_rslora": True}
    plain = model[0].up(X)
    megasched.build(sch)
    nn.init.ones_(model[0].up.lora_B.weight)
    added = model[0].up.lora_A(X).sum(-1, keepdim=True).expand(-1, 16)
    torch.testing.assert_close(model[0].up(X) - plain, 2 * added)


def test_dropout_is_drawn_in_training_alone(model):
    sch = megasched.create_schedule(model, ParallelDims())
    sch["0.up"].adapt(rank=4, dropout=0.5)
    up = megasched.build(sch)[0].up
    nn.init.ones_(up.lora_B.weight)
    assert not torch.equal(up(X), up(X))
    up.eval()
    assert torch.equal(up(X), up(X))


@pytest.mark.parametrize(
    ("fill", "what"),
    [
        (lambda sch: sch["1"].adapt(rank=4), "adapt takes a Linear or HF's Conv1D, and this is a LayerNorm"),
        (lambda sch: sch["0.up"].adapt(rank=0), "adapt: rank 0 is no positive whole number"),
        (lambda sch: sch["0.up"].adapt(rank=4, dropout=1.0), "adapt: dropout 1.0 is no probability below 1"),
        (lambda sch: sch["*.up"].adapt(rank=4)[0].adapt(rank=4), "is adapted twice"),
        (lambda sch: sch["1"].unfreeze(), "unfreeze: nothing is frozen, because no linear is adapted"),
        (lambda sch: (sch["0.up"].adapt(rank=4), sch["0.act"].unfreeze()), "the module has no parameters"),
        (
            lambda sch: (sch["0.up"].adapt(rank=4), sch["2.up"].adapt(rank=4, dropout=0.1)),
            r"adapt: dropout=0.1 here and dropout=0.0 at .*test_adapt.py:\d+, and a PEFT adapter has one for all",
        ),
        (
            lambda sch: (sch["0"].replace(lambda old: nn.Linear(8, 8), weights={}), sch["0.up"].adapt(rank=4)),
            "no weights for weight",
        ),
    ],
)
def test_refusals(model, fill, what):
    import re

    (found,) = refused(model, fill)
    assert re.search(what, found)


def test_a_linear_that_computes_more_is_refused(model):
    """Of it and its adapter no merged weight computes the same; a subclass that computes no more has one."""

    class Rounded(nn.Linear):
        def forward(self, x):
            return nn.functional.linear(x, self.weight.round(), self.bias)

    model[0].up, model[2].up = nn.modules.linear.NonDynamicallyQuantizableLinear(8, 16), Rounded(8, 16)
    (what,) = refused(model, lambda sch: sch["*.up"].adapt(rank=2))
    assert "adapt: Rounded computes or holds more than nn.Linear does" in what


def test_ties_are_refused():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8))
    model[1].weight = model[0].weight
    (what,) = refused(model, lambda sch: sch["0"].adapt(rank=2))
    assert "tied to another module's, which a merged adapter would change" in what
    model.append(nn.Linear(8, 8))
    (what,) = refused(model, lambda sch: (sch["3"].adapt(rank=2), sch["0"].unfreeze()))
    assert "tied to one outside of the module" in what


@pytest.mark.parametrize("path", ["0.up", "0", ""])
def test_what_is_trained_whole_has_no_adapter_in_it(model, path):
    """PEFT makes a copy of such a module, in which it does not look for adapters."""

    def fill(sch):
        sch["*.up"].adapt(rank=2)
        (sch[path] if path else sch).unfreeze()

    (what,) = refused(model, fill)
    assert what == "unfreeze: 0.up, which is adapted, is in it, and PEFT trains a module whole or by an adapter"


ADAPTED = {
    "llama": ["**.[qv]_proj", "**.o_proj", "**.down_proj", "**.gate_proj"],
    "gpt2": ["**.c_attn", "**.c_proj"],
    "phi3": ["**.qkv_proj", "**.gate_up_proj"],
}


def build_with_numbers(sch, inputs=None):
    """The plan of a build in which B is not zero."""
    from megasched.lowering import lora
    from megasched.lowering.build import build_with_plan

    real = lora.initial_value
    lora.initial_value = lambda name, shape: torch.linspace(-0.2, 0.3, shape[0] * shape[1]).reshape(shape)
    try:
        return build_with_plan(sch, inputs)
    finally:
        lora.initial_value = real


def adapted_step(family, level, cut):
    """In a rank: loss and gradients of an adapted model, whose schedule shards it or not; B is not zero."""
    init_megatron(tp=2)
    model = tiny_model(family)
    sch = megasched.create_schedule(model, roles=roles_of(model))
    if cut:
        auto(sch, sch.layout)
    for path in ADAPTED[family]:
        sch[path].adapt(rank=4, alpha=8)
    sch.level(level)
    plan = build_with_numbers(sch)
    loss = model(input_ids=token_ids(), labels=token_ids()).loss
    loss.backward()
    return loss.item(), gathered_gradients(model, plan)


@pytest.mark.parametrize("level", ["fused", "leaf"])
@pytest.mark.parametrize("family", ADAPTED)
def test_tp_changes_no_number(ranks, family, level):
    loss, gradients = ranks.run(2, adapted_step, family, level, True)[0]
    want, expected = ranks.run(2, adapted_step, family, level, False)[0]
    assert loss == pytest.approx(want, rel=1e-5)
    trained = {name: gradient for name, gradient in expected.items() if gradient is not None}
    assert {name for name, gradient in gradients.items() if gradient is not None} == trained.keys()
    assert {name.rpartition(".lora_")[2] for name in trained} == {"A.weight", "B.weight"}
    assert not too_far({name: distance(gradients[name], gradient) for name, gradient in trained.items()})


def output_of_four_dimensions(cut):
    """In a rank; Megatron's layers take three, and ours call themselves with the others flattened."""
    init_megatron(tp=2)
    model, x = randomize(Mlp()), torch.linspace(-1, 1, 96).reshape(2, 3, 2, 8)
    sch = megasched.create_schedule(model)
    if cut:
        sch["up"].shard("weight", axis=0)
        sch["down"].shard("weight", axis=1)
    sch["up"].adapt(rank=4)
    sch["down"].adapt(rank=4)
    build_with_numbers(sch, {"x": x})
    return model(x).detach()


def test_an_adapter_adds_once_whatever_the_dimensions(ranks):
    got, want = (ranks.run(2, output_of_four_dimensions, cut)[0] for cut in (True, False))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
