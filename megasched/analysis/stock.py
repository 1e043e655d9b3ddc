"""Whether a model is made of torch's and transformers' code alone, whose ways are known: the matrix runs it."""

from __future__ import annotations

from typing import Any

from torch import nn

_KNOWN = ("torch.", "transformers.")


def all_stock(model: nn.Module) -> bool:
    """Whether all modules are of their classes and do what these do: no hooks, no forward of an instance's own or
    put on a class."""
    return all(_is_stock(module) for module in model.modules())


def is_theirs(function: Any) -> bool:
    """Whether a function is written in torch or transformers."""
    return f"{getattr(function, '__module__', '')}.".startswith(_KNOWN)


def _is_stock(module: nn.Module) -> bool:
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    if any(hooks) or "forward" in vars(module):
        return False
    return f"{type(module).__module__}.".startswith(_KNOWN) and is_theirs(type(module).forward)
