"""Operators that somebody has put into a library of their own, with a backward of their own."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

_OF_TORCH = {"aten", "prims", "prim", "quantized", "profiler", "_c10d_functional", "c10d_functional", "c10d"}
_KEYS = ("Autograd", "AutogradCPU", "AutogradCUDA", "AutogradMeta")


class LibraryOperator:
    """An operator in the form of an ``autograd.Function``: its ``apply`` takes the operator's arguments, and those
    by name.

    Args:
        operator: as torch dispatches it.
    """

    def __init__(self, operator: torch._ops.OpOverload) -> None:
        self.operator = operator
        self.__name__ = str(operator)

    def apply(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the operator gives."""
        return self.operator(*args, **kwargs)


@cache
def library_operator(func: Any) -> LibraryOperator | None:
    """An operator with a backward that is not torch's; None for all others. The same object each time."""
    if not isinstance(func, torch._ops.OpOverload) or func.namespace in _OF_TORCH:
        return None
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return LibraryOperator(func) if any(has_kernel(func.name(), key) for key in _KEYS) else None
