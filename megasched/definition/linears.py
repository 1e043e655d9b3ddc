"""Linears as HF has them: torch's, its own ``Conv1D``, and instances that compute the same."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from megasched.definition.instances import comparable_state, computes, small_copy, tried_once
from megasched.language.lora import CONV1D

if TYPE_CHECKING:
    import torch
    from torch import nn

# Sizes of the small copy that is tried: features of input and output.
_INPUTS, _OUTPUTS = 7, 5
_TRIED: dict[Any, bool] = {}
_PLAIN = (type(None), bool, int, float, str)


def is_conv1d(module: nn.Module) -> bool:
    """Whether it is HF's ``Conv1D``, a linear that keeps its weight as [in, out]."""
    return (type(module).__module__, type(module).__name__) == CONV1D


def plain_attributes(module: nn.Module) -> dict[str, Any]:
    """What a definition's code may read of an instance beside its tensors: sizes, which mean the whole; marks."""
    return {
        name: value for name, value in vars(module).items() if not name.startswith("_") and type(value) in _PLAIN
    }


def output_axis(module: nn.Module) -> int:
    """Axis of the output features in a linear's weight: 0, but 1 in HF's Conv1D, which keeps [in, out]."""
    return 1 if is_conv1d(module) else 0


def is_linear(module: nn.Module) -> bool:
    """Whether a module computes what ``nn.Linear`` does, and holds nothing else.

    An instance of a subclass is tried with numbers, with all that it was given: fake quantization may be off in a
    new one and on in this one.
    """
    from torch import nn

    if not (isinstance(module, nn.Linear) or is_conv1d(module)):
        return False
    if "forward" in vars(module) or module._buffers:
        return False
    if not {"weight"} <= module._parameters.keys() <= {"weight", "bias"}:  # computed ones are no parameters
        return False
    if type(module) is nn.Linear or is_conv1d(module):
        return True
    return tried_once(_TRIED, comparable_state(module), partial(_computes_linear, module))


def _computes_linear(module: nn.Module) -> bool:
    from torch.nn import functional as F

    shapes = {"weight": (_OUTPUTS, _INPUTS), "bias": (_OUTPUTS,)}
    sizes = {"in_features": _INPUTS, "out_features": _OUTPUTS}
    small = small_copy(
        module, {name: shapes[name] for name, held in module._parameters.items() if held is not None}
    )
    vars(small).update(sizes)

    def linear(x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, small._parameters["weight"], small._parameters.get("bias"))

    return computes(small, linear, _INPUTS)
