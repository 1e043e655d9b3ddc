"""Computes RMS norms by torch's single kernel, if a trial shows that it equals the definition's module.

Definitions write the norm as five operations, each of which reads and writes the hidden state on a GPU.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from megasched.definition.instances import comparable_state, computes, small_copy, tried_once
from megasched.layers.regions import Forward, wrap_forward

_EPSILONS = ("variance_epsilon", "eps", "epsilon")


def fuse_norms(model: nn.Module, here: Callable[[str], bool]) -> None:
    """Makes ``F.rms_norm`` compute the RMS norms at the paths for which ``here`` holds.

    Modules, parameters and hooks stay.
    """
    shown: dict[Any, bool] = {}
    for path, module in model.named_modules():
        eps = _epsilon(module)
        if eps is None or not here(path):
            continue
        state = comparable_state(module)
        kind = None if state is None else (state, module.weight.shape[0])
        if tried_once(shown, kind, partial(_computes_rms_norm, module, eps)):
            wrap_forward(module, _fused(module, eps))


def _epsilon(module: nn.Module) -> float | None:
    """Returns the epsilon if a module may be an RMS norm, else None.

    It may be one with a vector as its only parameter, one epsilon, and a forward of one argument.
    """
    own = dict(module.named_parameters())
    plain = set(own) == {"weight"} and own["weight"].dim() == 1 and not list(module.named_buffers())
    if not plain or isinstance(module, nn.RMSNorm) or "forward" in vars(module):
        return None
    if len(inspect.signature(module.forward).parameters) != 1:
        return None
    found = [getattr(module, name) for name in _EPSILONS if isinstance(getattr(module, name, None), float)]
    return found[0] if len(found) == 1 else None


def _computes_rms_norm(module: nn.Module, eps: float) -> bool:
    """Compares the module with torch's kernel on inputs that reveal differences: small ones show epsilon."""
    size = module.weight.shape[0]
    small = small_copy(module, {"weight": (size,)})

    def norm(x: torch.Tensor) -> torch.Tensor:
        return torch.rms_norm(x, (size,), small.weight, eps)

    return computes(small, norm, size, (eps**0.5, 0.1 * eps**0.5), tolerance=1e-5)


def _fused(module: nn.Module, eps: float) -> Callable[[Forward], Forward]:
    def wrapper(forward: Forward) -> Forward:
        def fused(x: torch.Tensor) -> torch.Tensor:
            if x.dtype != module.weight.dtype:  # what comes out then is the definition's business
                return forward(x)
            if x.is_cuda:  # the kernel would copy columns of a joint product in both passes, and keep all of it
                x = x.contiguous()
            return F.rms_norm(x, module.weight.shape, module.weight, eps)

        return fused

    return wrapper
