"""Watches code that runs in the backward pass alone: functions with their own backward, and hooks on gradients.

A run on meta is a forward. Its operations show how their gradients are laid out, but not what a definition's own
code does to a gradient. A function's backward is tried with numbers (``rules/function_trials.py``). A hook can't
be tried: it is noted, and never gets a gradient of which a rank has a part. The same holds for code that packs the
tensors saved for the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from megasched.analysis.recording.library_operators import LibraryOperator
from megasched.analysis.recording.meta_call import tensors_in

# Their functions are known: what they do to gradients belongs to how ranks work together, or changes nothing.
_KNOWN = ("torch.", "megatron.", "megasched.", "model_adapters.", "transformer_engine.")
type Function = type[torch.autograd.Function] | LibraryOperator


@contextmanager
def watched_backward(
    called: Callable[[Function, tuple[Any, ...], Any], None],
    hooked: Callable[[torch.Tensor, Any], None],
    packing: Callable[[int], None],
) -> Iterator[None]:
    """Runs its body, and calls back for each thing that a definition does to gradients.

    Args:
        called: ``called(function, args, output)`` after the forward of the definition's own ``autograd.Function``;
            ``args`` are those of ``apply``.
        hooked: ``hooked(tensor, hook)`` when a tensor gets a hook on its gradient.
        packing: ``packing(1)`` where code enters its own ``torch.autograd.graph.saved_tensors_hooks``,
            ``packing(-1)`` where it leaves them.
    """
    # Of each class, also of one that has its forward from another: its backward may be its own.
    seen: dict[Function, Any] = {}
    for function in [*_functions(torch.autograd.Function)]:
        _watch(function, seen, called)
    apply = vars(torch.autograd.Function)["apply"]

    def applied(function: Function, *args: Any, **kwargs: Any) -> Any:
        """Watches a class that code made while it ran, then applies it."""
        _watch(function, seen, called)
        return apply.__get__(None, function)(*args, **kwargs)  # a classmethod, from torch 2.14 on one of C

    torch.autograd.Function.apply = classmethod(applied)  # type: ignore[method-assign, assignment]
    hooks = {name: getattr(torch.Tensor, name) for name in ("register_hook", "register_post_accumulate_grad_hook")}
    for name, register in hooks.items():
        setattr(torch.Tensor, name, _watched_hook(register, hooked))
    saved = torch.autograd.graph.saved_tensors_hooks
    ends = {name: getattr(saved, name) for name in ("__enter__", "__exit__")}
    for name, end in ends.items():
        setattr(saved, name, _watched_packing(end, packing, 1 if name == "__enter__" else -1))
    try:
        yield
    finally:
        for name, end in ends.items():
            setattr(saved, name, end)
        torch.autograd.Function.apply = apply  # type: ignore[method-assign]
        for function, own in seen.items():
            if own is not None:
                function.forward = own  # type: ignore[method-assign]
            else:
                del function.forward
        for name, register in hooks.items():
            setattr(torch.Tensor, name, register)


def handed_to_hooks(module: nn.Module, *values: Any) -> list[torch.Tensor]:
    """Returns the tensors among a module's inputs and outputs whose gradients its own backward hooks get."""
    if not (module._backward_hooks or module._backward_pre_hooks):
        return []
    return [tensor for tensor in tensors_in(values) if tensor.is_floating_point()]


def _functions(base: Function) -> Iterator[Function]:
    for function in base.__subclasses__():
        yield function
        yield from _functions(function)


def _watch(function: Function, seen: dict[Function, Any], called: Callable[..., None]) -> None:
    """Replaces the forward of a function class that belongs to the definition by one that calls ``called``.

    Args:
        seen: such classes -> the forward that the class itself defines, or None.
    """
    if function in seen or f"{function.__module__}.".startswith(_KNOWN):
        return
    forward, seen[function] = function.forward, vars(function).get("forward")
    function.forward = staticmethod(_watched(function, forward, called))  # type: ignore[method-assign]


def _watched(function: Function, forward: Callable[..., Any], called: Callable[..., None]) -> Callable[..., Any]:
    # The context is the first argument of a forward that sets it up itself.
    own = int(function.setup_context is torch.autograd.Function.setup_context)

    def watched(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        if any(tensor.is_meta for tensor in tensors_in(output)):  # the trial of a function has real ones
            called(function, args[own:], output)
        return output

    return watched


def _watched_packing(end: Callable[..., Any], packing: Callable[[int], None], change: int) -> Callable[..., Any]:
    def watched(context: Any, *args: Any) -> Any:
        # Torch's own classes keep the values: what they do is offloading and recompute.
        kind = type(context)
        if kind is torch.autograd.graph.saved_tensors_hooks or not kind.__module__.startswith("torch."):
            packing(change)
        return end(context, *args)

    return watched


def _watched_hook(register: Callable[..., Any], hooked: Callable[[torch.Tensor, Any], None]) -> Callable[..., Any]:
    def watched(tensor: torch.Tensor, hook: Any) -> Any:
        hooked(tensor, hook)
        return register(tensor, hook)

    return watched
