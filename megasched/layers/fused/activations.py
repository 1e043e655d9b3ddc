"""Computes activations that definitions write in several operations by torch's one kernel, if a trial shows it.

``NewGELUActivation`` of transformers, for instance, is eight operations, each of which reads and writes the widest
tensors of a layer.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from megasched.definition.instances import comparable_state, computes, is_of_transformers, tried_once
from megasched.layers.wrap import Forward, takes_any_name, wrap_forward

Pointwise = Callable[..., torch.Tensor]
_FEATURES = 6  # of a trial's inputs


class Activation(NamedTuple):
    """Names a function and its derivative: ``backward(gradient, x)``."""

    forward: Pointwise
    backward: Pointwise


def _gelu_backward(gradient: torch.Tensor, x: torch.Tensor, approximate: str) -> torch.Tensor:
    return torch.ops.aten.gelu_backward(gradient, x, approximate=approximate)


def _relu_backward(gradient: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.ops.aten.threshold_backward(gradient, x, 0)


ACTIVATIONS = {
    "silu": Activation(F.silu, torch.ops.aten.silu_backward),
    "gelu_tanh": Activation(partial(F.gelu, approximate="tanh"), partial(_gelu_backward, approximate="tanh")),
    "gelu": Activation(F.gelu, partial(_gelu_backward, approximate="none")),
    "relu": Activation(F.relu, _relu_backward),
}
_TRIED: dict[Any, str | None] = {}


def fuse_activations(model: nn.Module, here: Callable[[str], bool]) -> None:
    """Makes torch's kernels compute the activation modules at the paths for which ``here`` holds.

    Modules and hooks stay. Torch's own modules call these kernels already.
    """
    for path, module in model.named_modules():
        if not here(path) or not _may_be_activation(module):
            continue
        name = tried_once(_TRIED, comparable_state(module), partial(_activation, module))
        if name is not None:
            wrap_forward(module, takes_any_name(partial(_by_kernel, ACTIVATIONS[name].forward)))


def _may_be_activation(module: nn.Module) -> bool:
    """Returns whether a module is of transformers, holds nothing, and maps one tensor."""
    held = (*module._parameters.values(), *module._buffers.values(), *module._modules.values())
    if "forward" in vars(module) or any(each is not None for each in held) or not is_of_transformers(module):
        return False
    return len(inspect.signature(module.forward).parameters) == 1


def _activation(module: nn.Module) -> str | None:
    """Returns the name in ``ACTIVATIONS`` of what a module computes, if there is one."""
    small = copy.copy(module)
    matches = (name for name, one in ACTIVATIONS.items() if computes(small, one.forward, _FEATURES))
    return next(matches, None)


def _by_kernel(kernel: Pointwise, forward: Forward, x: torch.Tensor) -> torch.Tensor:
    return kernel(x)
