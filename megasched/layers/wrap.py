"""Wraps ``module.forward`` on the instance: paths, classes and state-dict keys stay.

This module does not import Megatron: a plan is made without it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from megasched.graph import opaque
from megasched.graph.intercept import Limits
from megasched.layers.recompute.kept_state import KeptState
from megasched.layers.recompute.recompute import recompute_call
from megasched.layers.rng import fork_rng

Forward = Callable[..., Any]


def wrap_forward(module: nn.Module, call: Callable[..., Any], *, node: str = "") -> None:
    """Makes a call of the module be ``call(forward, *args, **kwargs)``; its forward keeps its name and signature.

    Args:
        node: if given, the whole stays one call of that name in the graph of a module around this one, which would
            lose the backward of what ``call`` does.
    """
    inner = module.forward
    run = functools.partial(call, inner)
    if node:
        run = functools.partial(opaque.call, node, run)

    @functools.wraps(inner)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return run(*args, **kwargs)

    module.forward = wrapped


def takes_any_name(forward: Forward) -> Forward:
    """Has a forward of one argument take it by any name, as the definition's may have another than ours."""

    @functools.wraps(forward)
    def named(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, *kwargs.values())

    return named


def waits_for_parameters(hook: Callable[..., Any]) -> bool:
    """Returns whether a hook is one that Megatron's ``--overlap-param-gather`` puts before every module.

    See ``core/distributed/distributed_data_parallel.py:432``.
    """
    return getattr(hook, "__module__", "") == "megatron.core.distributed.distributed_data_parallel"


# What keeps a module a call, but for hooks that wait.
WAITING = Limits(waits=waits_for_parameters)


def wait_for_parameters(module: nn.Module) -> None:
    """Waits until a module's own parameters are gathered, for code that reads them without calling the module."""
    WAITING.wait(module)


def draw_forked(module: nn.Module) -> None:
    """Makes the module draw random numbers from Megatron's model-parallel RNG state."""

    def forked(forward: Forward, /, *args: Any, **kwargs: Any) -> Any:
        with fork_rng():
            return forward(*args, **kwargs)

    wrap_forward(module, forked, node="fork_rng")


def recompute_module(module: nn.Module, path: str) -> None:
    """Makes the module recompute its activations in the backward pass of training; a second call has no effect.

    Args:
        path: path of the module, for messages.
    """
    if getattr(module, "megasched_recomputed", False):
        return
    module.megasched_recomputed = True
    kept = KeptState(module, path)

    def recomputed(forward: Forward, /, *args: Any, **kwargs: Any) -> Any:
        if not (module.training and torch.is_grad_enabled()):
            return forward(*args, **kwargs)
        return recompute_call(kept, forward, args, kwargs)

    wrap_forward(module, recomputed, node="recompute")
