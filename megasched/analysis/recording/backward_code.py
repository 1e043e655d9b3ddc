"""Watches code that runs in the backward pass alone: functions with their own backward, and hooks on gradients.

A run on meta is a forward. Its operations show how their gradients are laid out, but not what a definition's own
code does to a gradient. A function's backward is tried with numbers (``rules/function_trials.py``). A hook can't
be tried: it is noted, and never gets a gradient of which a rank has a part. The same holds for code that packs the
tensors saved for the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from megasched.analysis.recording.meta_call import tensors_in
from megasched.analysis.recording.operators import LibraryOperator
from megasched.attributes import replaced

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
    seen: set[Function] = set()
    apply, saved = vars(torch.autograd.Function)["apply"], torch.autograd.graph.saved_tensors_hooks
    with ExitStack() as changes:

        def watch(function: Function) -> None:
            """Watches each class, also one that has its forward from another: its backward may be its own."""
            if function not in seen and not f"{function.__module__}.".startswith(_KNOWN):
                seen.add(function)
                watched = staticmethod(_watched(function, function.forward, called))
                changes.enter_context(replaced(function, "forward", watched))

        def applied(function: Function, *args: Any, **kwargs: Any) -> Any:
            """Watches a class that code made while it ran, then applies it."""
            watch(function)
            return apply.__get__(None, function)(*args, **kwargs)  # a classmethod, from torch 2.14 on one of C

        for function in [*_functions(torch.autograd.Function)]:
            watch(function)
        changes.enter_context(replaced(torch.autograd.Function, "apply", classmethod(applied)))
        for name in ("register_hook", "register_post_accumulate_grad_hook"):
            watched = _watched_hook(getattr(torch.Tensor, name), hooked)
            changes.enter_context(replaced(torch.Tensor, name, watched))
        for name, change in (("__enter__", 1), ("__exit__", -1)):
            watched = _watched_packing(getattr(saved, name), packing, change)
            changes.enter_context(replaced(saved, name, watched))
        yield


def handed_to_hooks(module: nn.Module, *values: Any) -> list[torch.Tensor]:
    """Returns the tensors among a module's inputs and outputs whose gradients its own backward hooks get."""
    if not (module._backward_hooks or module._backward_pre_hooks):
        return []
    return [tensor for tensor in tensors_in(values) if tensor.is_floating_point()]


def _functions(base: Function) -> Iterator[Function]:
    for function in base.__subclasses__():
        yield function
        yield from _functions(function)


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
