"""Finds operators that a library outside of torch has registered with their own backward."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

_OF_TORCH = {"aten", "prims", "prim", "quantized", "profiler", "_c10d_functional", "c10d_functional", "c10d"}
_KEYS = ("Autograd", "AutogradCPU", "AutogradCUDA", "AutogradMeta")


class LibraryOperator:
    """Presents an operator as an ``autograd.Function`` whose ``apply`` takes its positional and keyword arguments.

    Args:
        operator: the operator, as torch dispatches it.
    """

    def __init__(self, operator: torch._ops.OpOverload) -> None:
        self.operator = operator
        self.__name__ = str(operator)

    def apply(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns the operator's output."""
        return self.operator(*args, **kwargs)


@cache
def library_operator(func: Any) -> LibraryOperator | None:
    """Returns an operator whose backward is not torch's, as the same object each time; None for all others."""
    if not isinstance(func, torch._ops.OpOverload) or func.namespace in _OF_TORCH:
        return None
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return LibraryOperator(func) if any(has_kernel(func.name(), key) for key in _KEYS) else None
