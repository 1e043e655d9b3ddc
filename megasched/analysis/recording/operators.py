"""Reads facts about an operation from its schema, its tags and its kernels, never from parts of its name."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

# Namespaces of torch's operators, and keys of an operator's own backward.
_OF_TORCH = {"aten", "prims", "prim", "quantized", "profiler", "_c10d_functional", "c10d_functional", "c10d"}
_KEYS = ("Autograd", "AutogradCPU", "AutogradCUDA", "AutogradMeta")

# Arguments by which an operation that may draw random numbers says that it does not: the chance to drop something,
# and whether the model trains.
_CHANCES = ("dropout_p", "p")
_SWITCHES = ("training", "train")

# Beginnings of those that look at the shape and dtype of an operand, not at its values.
SHAPE_ONLY = tuple(
    f"aten.{name}{form}"
    for name in ("empty", "zeros", "ones", "full", "rand", "randn", "randint")
    for form in ("_like.", ".")
) + tuple(f"aten.new_{name}." for name in ("empty", "empty_strided", "zeros", "ones", "full"))


def arguments_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Returns the operation's arguments, defaults included, by the names of its schema."""
    given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False))
    return {
        **{argument.name: argument.default_value for argument in func._schema.arguments},
        **given,
        **kwargs,
    }


def draws(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Returns whether it draws random numbers, by ``torch.Tag.nondeterministic_seeded`` and its arguments."""
    if not _may_draw(func):
        return False
    told = arguments_of(func, args, kwargs)
    return not any(told.get(name) == 0 for name in _CHANCES) and not any(
        told.get(name) is False for name in _SWITCHES
    )


def written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Returns the operands that the operation changes in place."""
    names = _written_arguments(func)
    if not names:
        return []
    told = arguments_of(func, args, kwargs)
    found = [told[name] for name in names]
    return [
        tensor
        for value in found
        for tensor in (value if isinstance(value, list | tuple) else [value])
        if isinstance(tensor, torch.Tensor)
    ]


def base_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor that this one is a view of, or itself."""
    return tensor if tensor._base is None else tensor._base


@cache
def _may_draw(func: Any) -> bool:
    return isinstance(func, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in func.tags


@cache
def _written_arguments(func: Any) -> tuple[str, ...]:
    if not isinstance(func, torch._ops.OpOverload):
        return ()
    arguments = func._schema.arguments
    return tuple(argument.name for argument in arguments if argument.alias_info and argument.alias_info.is_write)


def fills_storage(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor's storage holds nothing beside its values."""
    return tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()


def storage_of(tensor: torch.Tensor) -> int:
    """Returns a number that is equal for all tensors with one storage, as a parameter and its ``.data`` have."""
    return tensor.untyped_storage()._cdata


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
