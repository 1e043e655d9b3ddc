"""Linears as HF has them: torch's, its own ``Conv1D``, and subclasses that compute the same."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn


def is_conv1d(module: nn.Module) -> bool:
    """Whether it is HF's ``Conv1D``, a linear that keeps its weight as [in, out]."""
    return (type(module).__module__, type(module).__name__) == ("transformers.pytorch_utils", "Conv1D")


def output_axis(module: nn.Module) -> int:
    """Axis of the output features in a linear's weight: 0, but 1 in HF's Conv1D, which keeps [in, out]."""
    return 1 if is_conv1d(module) else 0


def is_linear(module: nn.Module) -> bool:
    """Whether a module computes what ``nn.Linear`` does; a subclass with a forward of its own does not."""
    from torch import nn

    if "forward" in vars(module):
        return False
    if is_conv1d(module):
        return True
    return isinstance(module, nn.Linear) and _computes_linear(type(module))


@cache
def _computes_linear(kind: type[nn.Linear]) -> bool:
    """Whether a class computes what ``nn.Linear`` does; one with a forward of its own is tried with numbers."""
    import torch
    from torch import nn

    if kind.forward is nn.Linear.forward:
        return True
    try:
        with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.no_grad():
            trial, x = kind(5, 3, bias=True), torch.randn(2, 4, 5)
            expected = nn.functional.linear(x, trial.weight, trial.bias)
            return torch.allclose(trial(x), expected, rtol=1e-5, atol=1e-6)
    except Exception:  # made or called in a way of its own
        return False
