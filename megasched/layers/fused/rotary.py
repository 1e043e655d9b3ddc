"""Computes rotary embeddings of queries and keys by one kernel each, compiled from the definition's own function.

Definitions write them as ``q * cos + rotate_half(q) * sin``: ten operations that read and write queries and keys,
and as many in the backward. What is compiled is the function that the attention calls, whatever it computes:
partial, interleaved or scaled embeddings need no code of ours.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cache, partial
from types import CellType, FunctionType
from typing import Any

import torch
from torch import nn

from megasched.layers.fused.kernels import one_kernel
from megasched.layers.wrap import Forward, wrap_forward

# How transformers names these functions, in each of its definitions' files.
_PREFIX = "apply_rotary"

# The dims of a tensor, as they lie in memory.
type Order = tuple[int, ...]


def fuse_rotary(model: nn.Module, here: Callable[[str], bool]) -> None:
    """Has the attention modules at the paths for which ``here`` holds call compiled rotary functions.

    Modules and the definition's file stay: only the instance's forward looks the functions up elsewhere.
    """
    for path, module in model.named_modules():
        if not here(path) or "forward" in vars(module):
            continue
        forward = type(module).forward
        named = _rotary_functions(inspect.unwrap(forward))
        rebound = _with_globals(forward, {name: by_one_kernel(function) for name, function in named.items()})
        if named and rebound is not None:
            wrap_forward(module, partial(_call_rebound, module, rebound))


def _rotary_functions(function: Any) -> dict[str, Callable[..., Any]]:
    """Returns the functions that a forward finds by such a name in its file."""
    if not isinstance(function, FunctionType):
        return {}
    names = [name for name in function.__code__.co_names if name.startswith(_PREFIX)]
    found = {name: function.__globals__.get(name) for name in names}
    return {name: one for name, one in found.items() if isinstance(one, FunctionType)}


@cache
def by_one_kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a rotary function by one kernel each way; results and gradients lie in memory as its inputs do.

    Queries and keys are [b, heads, s, d] views of [b, s, heads, d] memory, which is what attention and the norms
    of heads read. Compiled without a word on it, the function writes [b, heads, s, d], which they would copy.
    """

    @torch.compile
    def kernel(orders: tuple[Order | None, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        laid_out = [(each, order) for each, order in zip(args, orders, strict=True) if order is not None]
        made = function(*map(_with_gradient_in, args, orders), **kwargs)
        if isinstance(made, torch.Tensor):
            return _as_one_of(laid_out, made)
        return type(made)(_as_one_of(laid_out, each) for each in made)

    def with_orders(*args: Any, **kwargs: Any) -> Any:
        orders = tuple(_order(each) if isinstance(each, torch.Tensor) else None for each in args)
        return kernel(orders, args, kwargs)

    return one_kernel(function, with_orders)


def _order(tensor: torch.Tensor) -> Order:
    """Returns the dims of a tensor from the one of the largest stride to that of the smallest."""
    return tuple(sorted(range(tensor.dim()), key=lambda dim: -tensor.stride(dim)))


def _dense(tensor: torch.Tensor, order: Order) -> torch.Tensor:
    inverse = [order.index(dim) for dim in range(len(order))]
    return tensor.permute(order).contiguous().permute(inverse)


def _as_one_of(inputs: list[tuple[torch.Tensor, Order]], made: Any) -> Any:
    """Returns a result in the order of the input of its shape, if there is one."""
    orders = [order for each, order in inputs if isinstance(made, torch.Tensor) and each.shape == made.shape]
    return _dense(made, orders[0]) if orders else made


def _with_gradient_in(argument: Any, order: Order | None) -> Any:
    return argument if order is None else _InOrder.apply(argument, order)


class _InOrder(torch.autograd.Function):
    """Gives a tensor's gradient an order of dims in memory."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, order: Order) -> torch.Tensor:
        ctx.order = order
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _dense(gradient, ctx.order), None


class _Globals(dict[str, Any]):
    """Looks names up in what it holds, then in a file's namespace as it is at the time."""

    def __init__(self, own: Mapping[str, Any], others: Mapping[str, Any]) -> None:
        super().__init__(own)
        self._others = others

    def __missing__(self, name: str) -> Any:
        return self._others[name]


def _with_globals(function: Any, own: Mapping[str, Any]) -> Any:
    """Returns a function with some global names of its own, below its decorators.

    A decorator must hold the function in its closure, as one with ``functools.wraps`` does; else None is returned.
    """
    if not isinstance(function, FunctionType):
        return None
    inner = getattr(function, "__wrapped__", None)
    namespace, cells = function.__globals__, function.__closure__
    if inner is None:
        namespace = _Globals(own, namespace)
    else:
        rebound = _with_globals(inner, own)
        held = [cell for cell in cells or () if cell.cell_contents is inner]
        if rebound is None or len(held) != 1:
            return None
        cells = tuple(CellType(rebound) if cell is held[0] else cell for cell in cells or ())
    made = FunctionType(function.__code__, namespace, function.__name__, function.__defaults__, cells)
    made.__kwdefaults__ = function.__kwdefaults__
    made.__dict__.update(function.__dict__)
    made.__qualname__, made.__module__ = function.__qualname__, function.__module__
    return made


def _call_rebound(
    module: nn.Module, rebound: Callable[..., Any], forward: Forward, /, *args: Any, **kwargs: Any
) -> Any:
    return rebound(module, *args, **kwargs)
