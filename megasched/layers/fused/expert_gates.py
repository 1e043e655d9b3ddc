"""Computes what experts put between their products by one kernel each way, compiled from their own method.

Experts of transformers compute gate and up of all chosen experts by one product, and hand its output to
``_apply_gate``: three operations and more on the widest tensors of a mixture.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from megasched.definition.instances import is_of_transformers
from megasched.layers.fused.kernels import one_kernel

_METHOD = "_apply_gate"


def fuse_expert_gates(model: nn.Module, here: Callable[[str], bool]) -> None:
    """Compiles the method of the experts at the paths for which ``here`` holds; modules stay.

    An instance that has a method of its own keeps it.
    """
    for path, module in model.named_modules():
        if here(path) and is_of_transformers(module, _METHOD) and _METHOD not in vars(module):
            setattr(module, _METHOD, partial(apply_gate, module))


def apply_gate(module: nn.Module, gate_up: torch.Tensor) -> torch.Tensor:
    """Maps what experts' first products make, [pairs, 2 f], to what their second ones read, [pairs, f]."""
    return one_kernel(getattr(type(module), _METHOD))(module, gate_up)
