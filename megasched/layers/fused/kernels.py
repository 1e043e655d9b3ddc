"""Compiles pointwise code to one kernel where the trainer compiles its own (``megatron/core/jit.py``)."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from typing import Any

import torch


def compiles(device: torch.device) -> bool:
    """Returns whether pointwise code is compiled on a device: on GPUs, unless ``--disable-jit-fuser`` says no."""
    from megatron.core import jit
    from torch._dynamo import config as dynamo

    disabled = dynamo.disable or os.environ.get("TORCHDYNAMO_DISABLE") == "1"
    return device.type == "cuda" and jit.jit_fuser is torch.compile and not disabled


@cache
def one_kernel(function: Callable[..., Any], kernel: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """Returns the function by Inductor, for tensors on a GPU where that is allowed; as it is for others.

    Args:
        kernel: computes the same there; by default the function, compiled.
    """
    compiled = torch.compile(function) if kernel is None else kernel

    def chosen(*args: Any, **kwargs: Any) -> Any:
        devices = {each.device for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)}
        return (compiled if devices and all(map(compiles, devices)) else function)(*args, **kwargs)

    return chosen
