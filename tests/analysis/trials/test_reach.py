"""What training reaches, against the gradients that plain HF leaves at None."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from megasched.analysis.find_layer_stack import find_layer_stack
from megasched.analysis.recording.meta_call import meta_copy
from megasched.analysis.trials.reach import Reach, find_reach
from megasched.definition.build import build_definition
from megasched.definition.objectives import objective_of
from megasched.definition.small_models.small_models import causal_lm_types, small_config

FAST = ("gemma3", "deepseek_v32", "big_bird", "reformer", "llama", "mllama", "qwen4_exp")
LENGTH = 24


def reach_of(definition, length: int = LENGTH) -> Reach:
    structure, objective = find_layer_stack(definition), objective_of(definition)
    inputs = objective.trial(definition.config, 2, length)
    if not structure.calls_loss:
        del inputs["labels"]
    inputs |= objective.constants
    return find_reach(meta_copy(definition), inputs, with_loss=structure.takes_labels)


def without_gradient(model_type: str) -> set[str]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(small_config(model_type)).float().train()
    ids = torch.randint(10, 90, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    model(input_ids=ids).logits.square().mean().backward()
    return {name for name, p in model.named_parameters() if p.requires_grad and p.grad is None}


@pytest.mark.parametrize(
    "model_type", [*FAST, *(pytest.param(t, marks=pytest.mark.slow) for t in causal_lm_types() if t not in FAST)]
)
def test_it_is_what_plain_hf_has_gradients_for(model_type):
    try:
        expected = without_gradient(model_type)
    except Exception as error:  # of whatever kind, of transformers' own: there is nothing to compare with
        if model_type in FAST:
            raise
        pytest.skip(f"plain HF does not run it: {error}"[:100])
    found = reach_of(build_definition(small_config(model_type)))
    assert set(found.never) == expected
    assert found.perhaps == ()


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x)


class Model(nn.Module):
    """Logits of embeddings that went through what ``route`` makes of experts."""

    def __init__(self, route) -> None:
        super().__init__()
        self.embed, self.gate = nn.Embedding(8, 4), nn.Linear(4, 3)
        self.experts = nn.ModuleList(Expert() for _ in range(3))
        self.matrices = nn.ParameterList(torch.zeros(4, 4) for _ in range(2))
        self.second, self.unused = nn.Linear(4, 4), nn.Parameter(torch.zeros(4))
        self.route = route

    def forward(self, input_ids):
        h = self.embed(input_ids)
        return SimpleNamespace(logits=self.route(self, h, self.gate(h)))


def chosen_by_value(model, h, scores):
    for index in scores.argmax(-1).flatten().tolist():
        h = h + model.experts[index](h)
    return h * scores.amax(-1, keepdim=True)


def chosen_by_item(model, h, scores):
    return model.experts[int(scores.sum() > 5)](h) * scores.amax(-1, keepdim=True)


def first_alone(model, h, scores):
    return model.experts[0](h) * scores.amax(-1, keepdim=True)


def a_matrix_chosen_by_value(model, h, scores):
    return h @ model.matrices[scores.argmax(-1).flatten().tolist()[0]] * scores.amax(-1, keepdim=True)


def second_by_value(model, h, scores):
    h = first_alone(model, h, scores)
    return model.second(h) if (scores > 0).all() else h


def indices_alone(model, h, scores):
    return sum(model.experts[n](h[:, model.second(h).argmax(-1)[0]]) for n in range(3)) * scores.sum()


def found(route) -> tuple[set[str], set[str], set[str]]:
    """Modules of what is never reached, of what perhaps is, and what was not called."""
    model = meta_copy(Model(route))
    reach = find_reach(model, {"input_ids": torch.zeros(2, 5, dtype=torch.long, device="meta")}, with_loss=False)
    never, perhaps = ({name.rpartition(".")[0] for name in names} for names in (reach.never, reach.perhaps))
    return never - {"", "matrices"}, perhaps, set(reach.uncalled) - {"matrices"}


def test_experts_that_values_choose_are_perhaps_reached():
    assert found(chosen_by_value) == ({"second"}, {"experts.1.linear", "experts.2.linear"}, {"second"})
    assert found(chosen_by_item) == ({"second"}, {"experts.1.linear", "experts.2.linear"}, {"second"})


def test_parameters_of_a_list_that_values_choose():
    never, perhaps, _ = found(a_matrix_chosen_by_value)
    assert never == {"second", *(f"experts.{n}.linear" for n in range(3))}
    assert perhaps == {"matrices"}


def test_experts_that_no_value_chooses_are_never_reached():
    others = {"second", "experts.1.linear", "experts.2.linear"}
    assert found(first_alone) == (others, set(), others)


def test_what_another_answer_reaches_is_perhaps_reached():
    never, perhaps, _ = found(second_by_value)
    assert "second" not in never
    assert "second" in perhaps


def test_what_is_read_for_indices_alone_is_called_and_never_reached():
    assert found(indices_alone) == ({"second"}, set(), set())


def test_a_parameter_of_the_model_itself():
    model = meta_copy(Model(first_alone))
    reach = find_reach(model, {"input_ids": torch.zeros(2, 5, dtype=torch.long, device="meta")}, with_loss=False)
    assert reach.never[0] == "unused"
    assert "" not in reach.uncalled


class Aside(torch.autograd.Function):
    """Reads a weight, and has a gradient for it, without being handed it by autograd."""

    @staticmethod
    def forward(ctx, h, module):
        ctx.module = module
        return module(h)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def by_a_function(model, h, scores):
    return Aside.apply(h, model.second) * scores.sum() * model.experts[0](h)


def test_what_a_function_with_its_own_backward_reads_counts_as_reached():
    assert "second" not in found(by_a_function)[0]


def test_a_forward_that_fails_tells_nothing():
    assert find_reach(meta_copy(Model(first_alone)), {}, with_loss=False) == Reach()
