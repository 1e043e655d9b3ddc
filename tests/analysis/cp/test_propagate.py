"""What needs the whole sequence is found by a run on meta; what can't be had is refused, never computed wrong."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megasched import patches
from megasched.analysis.cp import propagate
from megasched.analysis.cp.propagate import plan_sequence
from megasched.analysis.find_layer_stack import find_layer_stack
from megasched.language.tensor_types import ShardDim
from tests.lowering.models import tiny_model
from tests.ways import SEES_TENSORS_OF_LISTS


@pytest.fixture(autouse=True)
def one_sequence_a_row():
    patches.apply("zigzag_positions")
    yield
    patches.undo("zigzag_positions")


def plan(model, refuse=lambda path: ""):
    from megasched.layers import attention

    attention.enable(model)
    return plan_sequence(model, find_layer_stack(model), 2, refuse)


def problems(found):
    return [(problem.module, problem.what) for problem in found.problems]


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "opt", "gpt_neox"])
def test_attention_is_all_that_most_definitions_need(family):
    found = plan(tiny_model(family))
    assert (found.regions, found.problems, found.takes_positions) == ({}, [], True)
    assert len(found.attention) == find_layer_stack(tiny_model(family)).count


@pytest.mark.parametrize("family", ["gpt2", "opt", "llama"])
def test_positions_that_are_counted_and_not_given_are_found(family, monkeypatch):
    """GPT-2 and Llama count by arange, OPT sums up a mask."""
    monkeypatch.setattr(propagate, "takes_positions", lambda model: False)
    found = plan(tiny_model(family))
    assert len(found.problems) == 1
    assert "it needs the whole sequence" in found.problems[0].what
    assert "no module of its own is handed it" in found.problems[0].what


class With(nn.Module):
    """A module with something after it."""

    def __init__(self, inner, function):
        super().__init__()
        self.inner, self.function = inner, function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.inner(x))


def in_mlp(model, function):
    """The model with something in its MLPs."""
    for layer in model.model.layers:
        layer.mlp = With(layer.mlp, function)
    return model


class Convolution(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = x.new_ones(x.shape[-1], 1, 3)
        return nn.functional.conv1d(x.transpose(1, 2), weight, padding=1, groups=x.shape[-1]).transpose(1, 2)


MIXERS = {
    "a sum over tokens": lambda x: x + x.cumsum(1),
    "a mean over tokens": lambda x: x - x.mean(1, keepdim=True),
    "a shift": lambda x: torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], dim=1),
    "a convolution of equal length": Convolution(),
    "positions": lambda x: x * torch.arange(x.shape[1], device=x.device)[:, None],
    "a written part": lambda x: x.clone().index_fill_(1, torch.zeros(1, dtype=torch.long, device=x.device), 0.0),
    "a mask of its own": lambda x: torch.ones(x.shape[1], x.shape[1], device=x.device).tril() @ x,
    "the sorted tokens": lambda x: x.sort(dim=1).values,
    "numbers that it draws": lambda x: x + torch.empty_like(x).exponential_().log(),  # Phi-MoE chooses experts so
    "a shifted copy": lambda x: x.clone().narrow(1, 0, 1).copy_(x[:, 1:2]).expand_as(x) + x,
}


@pytest.mark.parametrize("name", MIXERS)
def test_a_module_that_mixes_tokens_is_run_on_the_whole_sequence(name):
    found = plan(in_mlp(tiny_model("llama"), MIXERS[name]))
    assert found.problems == []
    assert sorted(found.regions) == [f"model.layers.{i}.mlp" for i in range(len(found.regions))]
    assert found.regions["model.layers.0.mlp"].inputs == {0: ShardDim(1)}
    assert found.regions["model.layers.0.mlp"].outputs == {0: ShardDim(1)}


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * x.norm(dim=-1, keepdim=True),
        lambda x: x.flatten(0, 1).softmax(-1).view_as(x),
        lambda x: torch.where(x > 0, x, torch.zeros(x.shape[:2], device=x.device)[..., None]),
        lambda x: torch.cat([x[..., 1:], x[..., :1]], dim=-1),
        lambda x: x * torch.empty_like(x).bernoulli_(0.9),
    ],
)
def test_what_computes_each_token_by_itself_is_left_alone(function):
    found = plan(in_mlp(tiny_model("llama"), function))
    assert (found.regions, found.problems) == ({}, [])


def test_a_number_made_of_the_length_is_refused():
    found = plan(in_mlp(tiny_model("llama"), lambda x: x * (1.0 / x.shape[1])))
    assert problems(found) == [
        (
            "model.layers.0.mlp",
            "context parallelism: mul.Tensor goes by the length of the sequence, of which a rank sees a part",
        )
    ]


@pytest.mark.parametrize(
    ("function", "operation"),
    [
        (lambda x: x * torch.arange(x.shape[1] + 1.0, device=x.device)[-1], "arange"),
        (lambda x: x + torch.arange(-x.shape[1], x.shape[1], device=x.device).sum(), "arange"),
        (lambda x: x / torch.ones(2 * x.shape[1], device=x.device).sum(), "ones"),
        (lambda x: x * torch.full((), 1 / x.shape[1], device=x.device), "full"),
        (lambda x: x * torch.full(x.shape[:2], 1 / x.shape[1], device=x.device)[..., None], "full"),
        (lambda x: x * x.new_full((), 1 / x.shape[1]), "new_full"),
        (lambda x: x / torch.zeros(2 * x.shape[1], device=x.device).add(1).sum(), "zeros"),
        (lambda x: x * torch.tensor(1 / x.shape[1], device=x.device), "tensor"),
        (lambda x: x * torch.linspace(0, 1, 5 * x.shape[1], device=x.device)[1], "linspace"),
    ],
)
def test_what_is_made_of_the_length_and_is_no_part_of_the_sequence_is_refused(function, operation):
    """Of XLNet's relative positions a rank would see as many as its part has."""
    ((path, what),) = problems(plan(in_mlp(tiny_model("llama"), function)))
    assert path == "model.layers.0.mlp"
    assert what.startswith(f"context parallelism: {operation} goes by the length of the sequence")


def test_the_sum_of_a_list_as_long_as_the_sequence_is_refused_or_gets_all_of_it():
    found = plan(
        in_mlp(tiny_model("llama"), lambda x: x / torch.tensor([1.0] * x.shape[1], device=x.device).sum())
    )
    if SEES_TENSORS_OF_LISTS:
        assert (set(found.regions), found.problems) == ({f"model.layers.{index}.mlp" for index in range(2)}, [])
    else:
        ((path, what),) = problems(found)
        assert path == "model.layers.0.mlp"
        assert what.startswith("context parallelism: tensor goes by the length of the sequence")


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * torch.arange(x.shape[2], device=x.device),
        lambda x: torch.cat([x.new_zeros(x.shape[0], x.shape[1], 1), x[..., 1:]], dim=-1),
        lambda x: x + torch.full(x.shape[:2], 0.5, device=x.device)[..., None],
    ],
)
def test_what_is_made_of_other_sizes_is_no_hindrance(function):
    found = plan(in_mlp(tiny_model("llama"), function))
    assert (found.regions, found.problems) == ({}, [])


def test_rotary_frequencies_that_go_by_the_longest_position_see_all_positions():
    model = tiny_model("llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4})
    found = plan(model)
    assert (sorted(found.regions), found.problems) == (["model.rotary_emb"], [])


def test_a_region_that_can_not_be_is_refused_with_the_reason():
    found = plan(in_mlp(tiny_model("llama"), MIXERS["a sum over tokens"]), lambda path: "not here")
    assert found.regions == {}
    assert found.problems[0].module == "model.layers.0.mlp"
    assert found.problems[0].what.endswith("takes other tokens than its own), and not here")


def test_positions_that_mean_something_else_when_they_are_given_are_refused():
    """RoBERTa counts from the padding token's number on, and takes given positions as they are."""
    from megasched.definition.build import build_definition
    from megasched.definition.small_models.small_models import small_config

    found = plan(build_definition(small_config("roberta")))
    assert problems(found) == [
        ("", "context parallelism: position_ids that count from 0 are not what it makes by itself")
    ]


def test_a_model_that_is_built_without_the_trainer_is_refused():
    """Nobody would split its batch."""
    from megasched.errors import ScheduleError
    from megasched.language.parallel_dims import ParallelDims
    from megasched.language.schedule import create_schedule
    from megasched.plan.make import make_plan

    schedule = create_schedule(tiny_model("llama"), ParallelDims(context_parallel_size=2))
    with pytest.raises(ScheduleError, match="context parallelism is for Hugging Face's causal language models"):
        make_plan(schedule)


class Doubled(torch.autograd.Function):
    """Linear in the gradient, each token by itself."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


class NormedGradient(Doubled):
    @staticmethod
    def backward(ctx, grad):
        return grad / (grad.norm() + 1e-3)


class Mixing(nn.Module):
    """Takes other tokens than its own, so that it is run on the whole sequence."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x).cumsum(1)


def hooked(module):
    module.register_full_backward_hook(lambda module, grad_input, grad_output: None)
    return module


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda mlp: With(mlp, Doubled.apply), ""),
        (lambda mlp: nn.Sequential(mlp, Mixing(Doubled.apply)), ""),
        (lambda mlp: nn.Sequential(mlp, Mixing(NormedGradient.apply)), "does not take a part of a gradient"),
        (lambda mlp: With(mlp, NormedGradient.apply), "does not take a part of a gradient"),
        (hooked, "a hook is handed a gradient of which each rank has a part"),
        (lambda mlp: nn.Sequential(mlp, Mixing(hooked(nn.Tanh()))), "a hook is handed a gradient"),
    ],
)
def test_what_runs_in_the_backward_alone_takes_parts_of_gradients_or_is_refused(change, why):
    model = tiny_model("llama")
    layer = model.model.layers[1]
    layer.mlp = change(layer.mlp)
    found = plan(model)
    assert bool(found.problems) is bool(why)
    assert all(why in what for _, what in problems(found))
