"""Models of a loop of one's own under ``torch.autocast``: as near to float32 as Hugging Face's own are."""

import copy

import pytest
import torch

import megasched
from megasched.lowering.build import plan_of
from megasched.verify.bfloat16 import TENSOR_PARALLEL
from megasched.verify.ranks.pool import init_megatron
from tests.dialects.steps import unsharded
from tests.lowering.models import auto, tiny_model, token_ids
from tests.lowering.parity import scheduled_copy
from tests.tiny import FAMILIES


def _recomputed(sch):
    auto(sch)
    sch["model.layers.*"].checkpoint()


def _step(model, ids, device=None):
    with torch.autocast(device or "cpu", torch.bfloat16, enabled=device is not None):
        output = model(input_ids=ids, labels=ids)
    output.loss.backward()
    return output.logits.float(), output.logits.dtype


def _distance(one, other):
    return float(torch.cat([(one[name] - other[name]).flatten() for name in one]).norm())


def _ratios(model, fill=auto, device="cpu", sequence_parallel=False):
    """Distances from float32 over those of Hugging Face under autocast: of logits, and of all gradients."""
    ids, theirs = token_ids(length=16), copy.deepcopy(model)
    ours, _, _ = scheduled_copy(model, fill, sequence_parallel=sequence_parallel)
    exact, plain, found = _step(model, ids), _step(theirs, ids, "cpu"), _step(ours, ids, device)
    assert found[1] == plain[1] == torch.bfloat16
    gradients = [{name: one.grad for name, one in each.named_parameters()} for each in (model, theirs, ours)]
    placements = plan_of(ours).placements
    gradients[2] = {name: unsharded(placements[name], gradient) for name, gradient in gradients[2].items()}
    assert {gradient.dtype for gradient in gradients[2].values()} == {torch.float32}
    off = [_distance(each, gradients[0]) for each in gradients]
    return [float((found[0] - exact[0]).norm() / (plain[0] - exact[0]).norm()), off[2] / off[1]]


def _over_tp(families):
    init_megatron(tp=2)
    found = {family: _ratios(tiny_model(family)) for family in families}
    found["recomputed"] = _ratios(tiny_model("mistral"), _recomputed)
    found["mixture"] = _ratios(tiny_model("mixtral"))
    found["biases, SP"] = _ratios(tiny_model("gpt2"), sequence_parallel=True)
    found["named as on a GPU, SP"] = _ratios(tiny_model("gemma2"), device="cuda", sequence_parallel=True)
    return found


def _over_cp(families):
    init_megatron(cp=2)
    return {family: _ratios(tiny_model(family)) for family in families}


ALL = pytest.param(tuple(FAMILIES), marks=pytest.mark.slow)


@pytest.mark.parametrize("families", [("qwen2", "qwen3"), ALL])
@pytest.mark.parametrize("over", [_over_tp, _over_cp])
def test_autocast_is_as_near_to_float32_as_plain_hf(ranks, over, families):
    for found in ranks.run(2, over, families):
        for name, (logits, gradients) in found.items():
            assert logits <= TENSOR_PARALLEL.logits, name
            assert gradients <= TENSOR_PARALLEL.gradients, name


def _convolutions():
    init_megatron(tp=2)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Conv2d(8, 4, 1))
    x, theirs = torch.randn(2, 3, 6, 6), copy.deepcopy(model)
    sch = megasched.create_schedule(model)
    sch["0"].shard("weight", axis=0)
    sch["2"].shard("weight", axis=1)
    built = megasched.build(sch, inputs={"input": x})
    exact = theirs(x)
    with torch.autocast("cpu", torch.bfloat16):
        plain, found = theirs(x), built(x)
    return found.dtype == plain.dtype, float((found - exact).norm() / (plain - exact).norm())


def test_convolutions_return_what_autocast_does(ranks):
    for same, ratio in ranks.run(2, _convolutions):
        assert same
        assert ratio < 2  # each rank's product is rounded, and their sum


def _cut_logits():
    init_megatron(tp=2)
    ids, model = token_ids(), tiny_model("gpt2")
    built = megasched.build(megasched.create_schedule(copy.deepcopy(model), name="auto", parallel_output=True))
    with torch.autocast("cpu", torch.bfloat16):
        losses = [one(input_ids=ids, labels=ids).loss for one in (built, model)]
    return [loss.dtype for loss in losses], float(losses[0] / losses[1])


def test_the_loss_of_cut_logits(ranks):
    for dtypes, ratio in ranks.run(2, _cut_logits):
        assert dtypes == [torch.float32] * 2
        assert ratio == pytest.approx(1, rel=1e-3)
