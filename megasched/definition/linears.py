"""Finds linears of HF definitions: torch's, HF's own ``Conv1D``, and instances that compute the same."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from megasched.definition.instances import comparable_state, computes, small_copy, tried_once
from megasched.language.lora import is_conv1d, is_linear_class

if TYPE_CHECKING:
    import torch
    from torch import nn

# Sizes of the small copy that is tried: features of input and output.
_INPUTS, _OUTPUTS = 7, 5
_TRIED: dict[Any, bool] = {}
_PLAIN = (type(None), bool, int, float, str)


def plain_attributes(module: nn.Module) -> dict[str, Any]:
    """Returns an instance's attributes of plain types, which a definition's code may read: sizes and flags."""
    return {
        name: value for name, value in vars(module).items() if not name.startswith("_") and type(value) in _PLAIN
    }


def output_axis(module: nn.Module) -> int:
    """Returns the axis of the output features in a linear's weight: 1 in HF's Conv1D ([in, out]), else 0."""
    return 1 if is_conv1d(module) else 0


def features(linear: nn.Module) -> tuple[int, int]:
    """Returns the numbers of input and output features of a Linear or Conv1D."""
    outputs = output_axis(linear)
    return linear.weight.shape[1 - outputs], linear.weight.shape[outputs]


def is_linear(module: nn.Module) -> bool:
    """Returns whether a module computes the same as ``nn.Linear``, and holds no other tensors.

    An instance of a subclass is tried with numbers, with its own state: fake quantization may be off in a new
    instance and on in this one.
    """
    from torch import nn

    if not is_linear_class(module):
        return False
    if "forward" in vars(module) or module._buffers:
        return False
    if not {"weight"} <= module._parameters.keys() <= {"weight", "bias"}:  # computed ones are no parameters
        return False
    if type(module) is nn.Linear or is_conv1d(module):
        return True
    return tried_once(_TRIED, comparable_state(module), partial(_computes_linear, module))


def may_be_replaced(module: nn.Module) -> bool:
    """Returns whether a parallel layer may replace a module, so that a graph always calls it."""
    from torch import nn

    return is_linear_class(module) or isinstance(module, nn.Embedding)


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
