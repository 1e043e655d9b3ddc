"""What stands between a module and torch while its graph is made: leaves become opaque, losses are refused."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from megasched.graph import opaque


@dataclass
class Limits:
    """How far the trace of one module goes.

    Attributes:
        leaves: paths, from the traced module, of submodules that stay calls.
        decomposed: path of a linear -> whether its product stays a call of the live module, which then adds no
            bias itself; otherwise the product is an operation of the graph.
    """

    leaves: frozenset[str] = frozenset()
    decomposed: Mapping[str, bool] = field(default_factory=dict)


class LostBackward(Exception):
    """A custom autograd function was met, whose backward a graph would not have."""

    def __init__(self, function: type) -> None:
        self.function = function
        super().__init__(
            f"{function.__module__}.{function.__qualname__} is a custom autograd function, whose backward "
            "would be lost in a graph"
        )


@contextmanager
def intercepting(root: nn.Module, limits: Limits) -> Iterator[None]:
    """Inside, and only in a thread that is recording: calls of ``root``'s leaves stay calls, and so does
    attention that goes through HF's ``AttentionInterface``; a custom autograd function raises LostBackward."""
    paths = {id(vars(module)): path for path, module in root.named_modules()}
    run_module, apply_function = nn.Module.__call__, torch.autograd.Function.__dict__["apply"]

    def run(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        current = opaque.active()
        path = paths.get(id(vars(module)), "")
        if current is None or current.inside or not path:
            return run_module(module, *args, **kwargs)
        if path in limits.decomposed:
            with _forward_of(module, partial(_decomposed, root, path, module, limits.decomposed[path])):
                return run_module(module, *args, **kwargs)  # through the call, so that operations are named by it
        if path in limits.leaves or _is_hooked(module):
            return opaque.call(path, partial(_live, root, path), *args, **kwargs)
        return run_module(module, *args, **kwargs)

    def apply(function: type, *args: Any, **kwargs: Any) -> Any:
        current = opaque.active()
        # An operator registered with torch.library is one node of a graph, and brings its backward.
        registered = function.__module__.startswith("torch._library")
        if current is not None and not current.inside and not registered:
            raise LostBackward(function)
        return apply_function.__get__(None, function)(*args, **kwargs)

    with ExitStack() as undo:
        nn.Module.__call__ = run
        undo.callback(setattr, nn.Module, "__call__", run_module)
        torch.autograd.Function.apply = classmethod(apply)
        undo.callback(setattr, torch.autograd.Function, "apply", apply_function)
        undo.enter_context(_opaque_attention(paths))
        yield


def _live(root: nn.Module, path: str, *args: Any, **kwargs: Any) -> Any:
    """The module that stands there now, with its hooks and whatever wraps its forward."""
    return root.get_submodule(path)(*args, **kwargs)


def _is_hooked(module: nn.Module) -> bool:
    tables = (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )
    return any(tables)


@contextmanager
def _forward_of(module: nn.Module, function: Callable[..., Any]) -> Iterator[None]:
    """Inside, the next call of the module runs ``function`` in the place of its forward."""
    own = vars(module).get("forward")

    def restore() -> None:
        vars(module).pop("forward", None)
        if own is not None:
            module.forward = own

    def forward(*args: Any, **kwargs: Any) -> Any:
        restore()
        return function(*args, **kwargs)

    module.forward = forward
    try:
        yield
    finally:
        restore()


def _decomposed(root: nn.Module, path: str, module: nn.Module, live: bool, x: torch.Tensor) -> torch.Tensor:
    """A linear as product and bias: [..., in] -> [..., out]."""
    if live:
        product = opaque.call(f"{path}.matmul", partial(_live, root, path), x)
    else:
        weight = module.weight if is_conv1d(module) else module.weight.t()
        product = torch.matmul(x, weight)
    return product if module.bias is None else product + module.bias


def is_conv1d(module: nn.Module) -> bool:
    """Whether it is HF's ``Conv1D``, a linear that keeps its weight as [in, out]."""
    return (type(module).__module__, type(module).__name__) == ("transformers.pytorch_utils", "Conv1D")


def keeps_weights_of_its_own(module: nn.Module) -> bool:
    """Whether a module is one of those that a parallel layer may take the place of: it stays a call always."""
    return isinstance(module, nn.Linear | nn.Embedding) or is_conv1d(module)


@contextmanager
def _opaque_attention(paths: Mapping[int, str]) -> Iterator[None]:
    """The kernel is chosen when the model is built (it may be Transformer Engine's, draw its own random numbers
    or be recomputed), so a graph keeps attention as one call, named ``<module>.attention``."""
    loaded = sys.modules.get("transformers.modeling_utils")
    if loaded is None:
        yield
        return
    interface = loaded.AttentionInterface
    found = interface.get_interface

    def get_interface(self: Any, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        function = found(self, *args, **kwargs)

        def attend(module: nn.Module, *tensors: Any, **options: Any) -> Any:
            path = paths.get(id(vars(module)), "")
            name = f"{path}.attention" if path else "attention"
            return opaque.call(name, partial(function, module), *tensors, **options)

        return attend

    interface.get_interface = get_interface
    try:
        yield
    finally:
        interface.get_interface = found
