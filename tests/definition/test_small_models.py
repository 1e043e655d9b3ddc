"""Small models compute the same at each run: what a check finds must not be the luck of a draw."""

import pytest
import torch
from torch import nn

from megasched.definition.small_models.covering import lacking
from megasched.definition.small_models.small_models import causal_lm_types, small_config

# Routes by what it draws in training, whatever its config says.
RANDOM = {"phimoe"}
FAST = ("llama", "reformer", "big_bird", "qwen4_exp")


def gradients(model, ids: torch.Tensor, seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    model.zero_grad()
    model(input_ids=ids).logits.square().mean().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def runs_alike(model_type: str) -> bool:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(small_config(model_type)).float().train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape))  # positions that start at zero tell nothing
    ids = torch.randint(10, 90, (2, 16))
    first, second = gradients(model, ids, 1), gradients(model, ids, 2)
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    "model_type", [*FAST, *(pytest.param(t, marks=pytest.mark.slow) for t in causal_lm_types() if t not in FAST)]
)
def test_gradients_are_the_same_whatever_the_seed(model_type):
    try:
        alike = runs_alike(model_type)
    except Exception as error:  # of whatever kind, of transformers' own: there is nothing to compare
        if model_type in FAST:
            raise
        pytest.skip(f"plain HF does not run it: {error}"[:100])
    assert alike == (model_type not in RANDOM)


class ByNumber(nn.Module):
    """A layer whose code decides by its number, and by what it is given, what it computes."""

    def __init__(self, number):
        super().__init__()
        self.number = number

    def forward(self, x, mask=None):
        if mask is not None and not (self.number + 1) % PERIOD:
            x = x + mask
        return x * 2 if self.number > 7 and x.any() else self.scaled(x)

    def scaled(self, x):
        return x + 1 if self.absent.number else x


PERIOD = 3


def test_a_kind_of_layer_that_a_forward_alone_makes_of_its_number_is_seen():
    whole, three, two = (nn.ModuleDict({"layers": nn.ModuleList(map(ByNumber, range(n)))}) for n in (12, 3, 2))
    assert [(lack.path, lack.what) for lack in lacking(whole, two)] == [
        ("layers.2", "(self.number + 1) % PERIOD=False, self.number > 7=False"),
        ("layers.8", "(self.number + 1) % PERIOD=False, self.number > 7=True"),
        ("layers.9", "(self.number + 1) % PERIOD=True, self.number > 7=True"),
    ]
    assert [lack.path for lack in lacking(whole, three)] == ["layers.8", "layers.9"]
    assert lacking(whole, nn.ModuleDict({"layers": nn.ModuleList(map(ByNumber, range(10)))})) == []
