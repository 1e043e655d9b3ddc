"""Checks whether a model consists of torch's and transformers' code alone, which the compatibility matrix runs."""

from __future__ import annotations

from typing import Any

from torch import nn

_KNOWN = ("torch.", "transformers.")
_ADAPTERS = "megasched.lowering.lora"  # whose steps are compared with PEFT's


def all_stock(model: nn.Module) -> bool:
    """Returns whether all modules have classes and forwards of torch or transformers, unchanged.

    All hooks must be an adapter's, and no instance may have a forward of its own.
    """
    return all(_is_stock(module) for module in model.modules())


def is_theirs(function: Any) -> bool:
    """Returns whether a function is written in torch or transformers."""
    return f"{getattr(function, '__module__', '')}.".startswith(_KNOWN)


def _is_stock(module: nn.Module) -> bool:
    tables = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    hooks = [hook for table in tables for hook in table.values()]
    if "forward" in vars(module) or not all(type(hook).__module__ == _ADAPTERS for hook in hooks):
        return False
    return f"{type(module).__module__}.".startswith(_KNOWN) and is_theirs(type(module).forward)
