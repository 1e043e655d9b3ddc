"""Finds the plain numbers that operations get, and the operations whose values depend on them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

# Make tensors of sizes, and of a number.
CONSTANTS = frozenset(["zeros", "ones", "full", "empty", "new_zeros", "new_ones", "new_full", "new_empty"])


def numbers_in(args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> list[float]:
    """Returns the arguments of an operation that are plain numbers."""
    return [value for value in (*args, *(kwargs or {}).values()) if isinstance(value, int | float)]


COUNTING = frozenset(["arange", "linspace", "logspace"])  # make places, of nothing
# Put a number into a tensor that they make, beside its sizes.
FILLING = frozenset(["full", "new_full", "full_like", "fill", "fill_", "scalar_tensor"])


def goes_by_numbers(func: Any) -> bool:
    """Returns whether an operation's plain numbers are, or change, the values of its output."""
    return torch.Tag.pointwise in getattr(func, "tags", ()) or func.__name__.partition(".")[0] in FILLING


def numbers_given(values: Any) -> list[float]:
    """Returns the plain numbers in the data that a tensor is made of."""
    if isinstance(values, int | float):
        return [values]
    if isinstance(values, list | tuple):
        return [number for value in values for number in numbers_given(value)]
    return numbers_given(values.tolist()) if isinstance(values, np.ndarray | np.generic) else []
