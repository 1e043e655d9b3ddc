"""Computes norms by one kernel: an RMS norm's, if a trial shows that it equals the definition's module.

Definitions write a norm as five operations and more, each of which reads and writes the hidden state on a GPU. An
RMS norm has torch's kernel, and one whose weight is added to 1 (Gemma's) Transformer Engine's. What is neither, or
has no kernel there, is compiled as it is written.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sized
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from megasched.definition.instances import (
    Itself,
    comparable_state,
    computes,
    is_of_transformers,
    small_copy,
    tried_once,
)
from megasched.layers.fused.kernels import one_kernel
from megasched.layers.wrap import Forward, takes_any_name, wrap_forward

_EPSILONS = ("variance_epsilon", "eps", "epsilon")
_TRIED: dict[Any, bool] = {}  # stages have the same norms, and a trial of a wide one takes seconds


def fuse_norms(model: nn.Module, here: Callable[[str], bool], te: bool = False) -> None:
    """Makes one kernel compute each of the norms at the paths for which ``here`` holds.

    Modules, parameters and hooks stay.

    Args:
        te: whether Transformer Engine's kernels can be used.
    """
    for path, module in model.named_modules():
        if not here(path) or not _may_be_norm(module):
            continue
        name = _epsilon_name(module)
        eps = None if name is None else getattr(module, name)
        if name is not None and _is_rms_norm(module, eps, 0.0):
            wrap_forward(module, takes_any_name(partial(_fused, module, name)))
        elif not is_of_transformers(module):
            continue
        elif te and eps is not None and _is_rms_norm(module, eps, 1.0):
            wrap_forward(module, takes_any_name(_zero_centered(module, eps)))
        else:
            wrap_forward(module, takes_any_name(partial(_compiled, module)))


def _may_be_norm(module: nn.Module) -> bool:
    """Returns whether a module holds one vector, its weight, and maps one tensor; torch's own has its kernel."""
    own = dict(module.named_parameters())
    plain = set(own) == {"weight"} and own["weight"].dim() == 1 and not list(module.named_buffers())
    if not plain or isinstance(module, nn.RMSNorm | nn.LayerNorm) or "forward" in vars(module):
        return False
    return len(inspect.signature(module.forward).parameters) == 1


def _epsilon_name(module: nn.Module) -> str | None:
    """Returns the name under which a norm has its epsilon, if it has one."""
    names = [name for name in _EPSILONS if isinstance(getattr(module, name, None), float)]
    return names[0] if len(names) == 1 else None


def _is_rms_norm(module: nn.Module, eps: float, added: float) -> bool:
    """Returns whether a module is an RMS norm that scales by its weight and what is added to it."""
    state = comparable_state(module)
    key = None if state is None else (state, module.weight.shape[0], added)
    return tried_once(_TRIED, key, partial(_computes_rms_norm, module, eps, added))


def _computes_rms_norm(module: nn.Module, eps: float, added: float) -> bool:
    """Compares the module with torch's kernel on inputs that reveal differences: small ones show epsilon.

    A module whose code leaves something behind on it does more than that.
    """
    size = module.weight.shape[0]
    small = small_copy(module, {"weight": (size,)})

    def norm(x: torch.Tensor) -> torch.Tensor:
        return torch.rms_norm(x, (size,), small.weight + added, eps)

    before = _attributes(small)
    equal = computes(small, norm, size, (eps**0.5, 0.1 * eps**0.5), tolerance=1e-5)
    return equal and _attributes(small) == before


def _attributes(module: nn.Module) -> dict[str, tuple[Itself, int | None]]:
    """Returns what the module has as attributes, and how much is in each that has a length."""
    held = ((name, value) for name, value in vars(module).items() if name != "training")
    sized = {
        name: (value, isinstance(value, Sized) and not isinstance(value, torch.Tensor)) for name, value in held
    }
    return {
        name: (Itself(value), len(value) if has_length else None) for name, (value, has_length) in sized.items()
    }


def _fused(module: nn.Module, epsilon: str, forward: Forward, x: torch.Tensor) -> torch.Tensor:
    if x.dtype != module.weight.dtype:  # what comes out then is the definition's business
        return forward(x)
    if x.is_cuda:  # the kernel would copy columns of a joint product in both passes, and keep all of it
        x = x.contiguous()
    return F.rms_norm(x, module.weight.shape, module.weight, getattr(module, epsilon))


def _zero_centered(module: nn.Module, eps: float) -> Callable[[Forward, torch.Tensor], Any]:
    @cache
    def kernel() -> Any:
        from transformer_engine.pytorch import RMSNorm

        return RMSNorm(module.weight.shape[0], eps=eps, zero_centered_gamma=True, device="meta")

    return lambda forward, x: zero_centered_norm(module, kernel, forward, x)


def zero_centered_norm(module: nn.Module, kernel: Callable[[], Any], forward: Forward, x: torch.Tensor) -> Any:
    """Runs Transformer Engine's kernel, which adds 1 to the weight in float32, as the definition does.

    Args:
        kernel: returns Transformer Engine's module, which is made at the first call.
        forward: the definition's, for tensors of another dtype than the weight.
    """
    if x.dtype != module.weight.dtype:
        return forward(x)
    norm = kernel()
    norm.weight = module.weight  # which may have been replaced
    return norm(x)


def _compiled(module: nn.Module, forward: Forward, x: torch.Tensor) -> Any:
    return compiled_norm(module, x)


def compiled_norm(module: nn.Module, x: torch.Tensor) -> Any:
    """Runs a norm's own forward by one kernel each way."""
    return one_kernel(type(module).forward)(module, x)
