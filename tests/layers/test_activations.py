"""Activations that transformers writes in several operations, by torch's kernels."""

import pytest
import torch
from torch import nn
from transformers.activations import ACT2FN

from megasched.layers.fused.activations import ACTIVATIONS, _activation, fuse_activations


@pytest.mark.parametrize(
    ("name", "kernel"),
    [
        ("gelu_new", "gelu_tanh"),
        ("gelu_pytorch_tanh", "gelu_tanh"),
        ("gelu_accurate", "gelu_tanh"),
        ("gelu", "gelu"),
        ("silu", "silu"),
        ("quick_gelu", None),
        ("gelu_10", None),
        ("relu2", None),
        ("laplace", None),
    ],
)
def test_an_activation_is_told_by_its_numbers(name, kernel):
    module = ACT2FN[name]
    assert _activation(module) == kernel
    model = nn.ModuleDict({"act": module})
    x = torch.randn(3, 50, dtype=torch.float64)
    before = module(x)
    fuse_activations(model, lambda path: True)
    of_transformers = type(module).__module__.startswith("transformers.")
    assert ("forward" in vars(module)) == (kernel is not None and of_transformers)
    torch.testing.assert_close(module(x), before, rtol=1e-9, atol=1e-9)
    if kernel is not None:
        assert torch.equal(module(x), ACTIVATIONS[kernel].forward(x))


def test_what_holds_parameters_or_is_elsewhere_stays():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x):
            return nn.functional.silu(self.scale * x)

    model = nn.ModuleDict({"act": Scaled(), "other": ACT2FN["gelu_new"]})
    fuse_activations(model, lambda path: path == "act")
    assert not any("forward" in vars(module) for module in model.modules())
