"""What runs in the backward pass alone: functions that bring a backward of their own, and hooks on gradients.

A run on meta is a forward. Operations of it say how their gradients lie; what a definition does to a gradient by
its own code does not show. A function's backward is tried with numbers: on the parts of its gradients it must do
what it does on the whole. A hook can't be tried; it is seen, and is given no gradient of which a rank has a part;
nor is what packs the tensors that are saved for the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from megasched.analysis.dims import local_shard
from megasched.analysis.library_operators import LibraryOperator
from megasched.analysis.meta_call import tensors_in
from megasched.definition.instances import close, real_tensors
from megasched.language.tensor_types import ShardDim

# Their functions are known: what they do to gradients belongs to how ranks work together, or changes nothing.
_KNOWN = ("torch.", "megatron.", "megasched.", "model_adapters.", "transformer_engine.")
# Of the numbers that are tried: how large they are, and whether all are positive.
_NUMBERS = ((1.0, False), (1e-2, False), (30.0, False), (1.0, True))
_TOLERANCE = 1e-4
_PARTS = 2
_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device)

type Function = type[torch.autograd.Function] | LibraryOperator


@contextmanager
def watched_backward(
    called: Callable[[Function, tuple[Any, ...], Any], None],
    hooked: Callable[[torch.Tensor, Any], None],
    packing: Callable[[int], None],
) -> Iterator[None]:
    """Tells of what a definition does to gradients.

    Args:
        called: ``called(function, args, output)`` after the forward of an ``autograd.Function`` of its own;
            ``args`` are those of ``apply``.
        hooked: a tensor that gets a hook on its gradient, and the hook.
        packing: 1 where code enters ``torch.autograd.graph.saved_tensors_hooks`` of its own, -1 where it leaves.
    """
    # Of each class, also of one that has its forward from another: its backward may be its own.
    seen: dict[Function, Any] = {}
    for function in [*_functions(torch.autograd.Function)]:
        _watch(function, seen, called)
    apply = vars(torch.autograd.Function)["apply"]

    def applied(function: Function, *args: Any, **kwargs: Any) -> Any:
        """Code may make a class as it runs."""
        _watch(function, seen, called)
        return apply.__func__(function, *args, **kwargs)

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
    """Of what a module took and gave, the tensors whose gradients its own backward hooks are handed."""
    if not (module._backward_hooks or module._backward_pre_hooks):
        return []
    return [tensor for tensor in tensors_in(values) if tensor.is_floating_point()]


def _functions(base: Function) -> Iterator[Function]:
    for function in base.__subclasses__():
        yield function
        yield from _functions(function)


def _watch(function: Function, seen: dict[Function, Any], called: Callable[..., None]) -> None:
    """The forward of one of the definition's own is watched from now on.

    Args:
        seen: such functions -> the forward that the class itself has.
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


class FunctionTrials:
    """Whether functions work part by part; each is tried once."""

    def __init__(self) -> None:
        self._known: dict[Any, bool] = {}

    def works_by_parts(
        self,
        function: Function,
        args: tuple[Any, ...],
        output: Any,
        along: Callable[[torch.Tensor], ShardDim | None],
    ) -> bool:
        """Tries a function with random numbers, forward and backward.

        Args:
            args, output: of a call on meta.
            along: how a tensor of them is cut; None for what is whole.

        Returns:
            Whether from parts come the same parts, of outputs and gradients, and from what is whole gradients that
            add up. Where no output is cut: whether gradients of it that add up give such gradients.
        """
        leaves, spec = torch.utils._pytree.tree_flatten(args)
        cuts = [along(leaf) if isinstance(leaf, torch.Tensor) else None for leaf in leaves]
        places = [along(tensor) for tensor in tensors_in(output)]
        key = function, str(spec), tuple(map(_kind, leaves)), tuple(cuts), tuple(places)
        if key not in self._known:
            self._known[key] = _tried(function, leaves, spec, cuts, places)
        return self._known[key]


def _kind(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return tuple(leaf.shape), leaf.dtype
    return (type(leaf), leaf) if isinstance(leaf, _PLAIN) else id(leaf)


def _tried(
    function: Function,
    leaves: list[Any],
    spec: Any,
    cuts: Sequence[ShardDim | None],
    places: Sequence[ShardDim | None],
) -> bool:
    if len({place is None for place in places}) != 1:
        return False
    with real_tensors(), torch.random.fork_rng(devices=[]), torch.enable_grad():
        try:
            tried = [_same(function, leaves, spec, cuts, places, *numbers) for numbers in _NUMBERS]
        except Exception:  # of whatever kind: what can't be tried is not known
            return False
    return False not in tried and True in tried


def _same(
    function: Function,
    leaves: list[Any],
    spec: Any,
    cuts: Sequence[ShardDim | None],
    places: Sequence[ShardDim | None],
    scale: float,
    positive: bool,
) -> bool | None:
    """None for numbers that it is not made for: it gives none for them."""
    generator = torch.Generator().manual_seed(0)

    def numbers(tensor: torch.Tensor, *, positive: bool = False) -> torch.Tensor:
        if not tensor.is_floating_point():
            return torch.zeros(tensor.shape, dtype=tensor.dtype)
        values = scale * torch.randn(tensor.shape, generator=generator)
        return (values.abs() if positive else values).to(tensor.dtype)

    def run(values: list[Any], grads: list[torch.Tensor] | None) -> tuple[list[torch.Tensor], list[Any]]:
        args = [v.requires_grad_() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for v in values]
        inputs = [v for v in args if isinstance(v, torch.Tensor) and v.requires_grad]
        # Views, since a function may write to what it is handed, and a leaf is not to be written to.
        given = [v.view_as(v) if isinstance(v, torch.Tensor) and v.requires_grad else v for v in args]
        outputs = tensors_in(function.apply(*torch.utils._pytree.tree_unflatten(given, spec)))
        grads = grads or [numbers(output) for output in outputs]
        handed.append(grads)
        return outputs, list(torch.autograd.grad(outputs, inputs, grads, allow_unused=True))

    handed: list[list[torch.Tensor]] = []
    whole = [numbers(leaf, positive=positive) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    outputs, gradients = run([_copied(leaf) for leaf in whole], None)
    told = [tensor for tensor in (*outputs, *gradients) if tensor is not None]
    if not all(torch.isfinite(tensor).all() for tensor in told):
        return None
    of_ranks = _gradients_of_ranks(handed[0], places, numbers)
    found = []
    for rank, grads in enumerate(of_ranks):
        values = [_copied(_part(leaf, cut, rank)) for leaf, cut in zip(whole, cuts, strict=True)]
        own, gradient = run(values, grads)
        wanted = [_part(output, place, rank) for output, place in zip(outputs, places, strict=True)]
        if not all(close(one, other, _TOLERANCE) for one, other in zip(own, wanted, strict=True)):
            return False
        found.append(gradient)
    inputs = [cut for leaf, cut in zip(leaves, cuts, strict=True) if _is_float(leaf)]
    return all(
        _gradient_fits(want, cut, [gradient[index] for gradient in found])
        for index, (want, cut) in enumerate(zip(gradients, inputs, strict=True))
    )


def _gradients_of_ranks(
    whole: list[torch.Tensor], places: Sequence[ShardDim | None], numbers: Callable[..., torch.Tensor]
) -> list[list[torch.Tensor]]:
    """What each rank has of the gradients of outputs: a part, or of what is whole some term."""
    if places[0] is not None:
        return [
            [_part(grad, place, rank) for grad, place in zip(whole, places, strict=True)] for rank in range(_PARTS)
        ]
    terms = [[numbers(grad) for grad in whole] for _ in range(_PARTS - 1)]
    rest = [grad - sum(each) for grad, *each in zip(whole, *terms, strict=True)]
    return [*terms, rest]


def _gradient_fits(want: torch.Tensor | None, cut: ShardDim | None, found: list[torch.Tensor | None]) -> bool:
    if want is None or any(gradient is None for gradient in found):
        return want is None and all(gradient is None for gradient in found)
    if cut is None:
        return close(sum(found), want, _TOLERANCE)
    return all(close(gradient, _part(want, cut, rank), _TOLERANCE) for rank, gradient in enumerate(found))


def _part(leaf: Any, cut: ShardDim | None, rank: int) -> Any:
    return leaf if cut is None else local_shard(leaf, cut, rank, _PARTS)


def _copied(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
