"""Tries functions with their own backward on numbers, to see whether it works on parts of gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from megasched.analysis.recording.backward_code import Function
from megasched.analysis.recording.meta_call import tensors_in
from megasched.definition.instances import close, real_tensors
from megasched.language.tensor_types import ShardDim

# Of the numbers that are tried: how large they are, and whether all are positive.
_NUMBERS = ((1.0, False), (1e-2, False), (30.0, False), (1.0, True))
_TOLERANCE = 1e-4
_PARTS = 2
_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device)


def local_shard(tensor: torch.Tensor, along: ShardDim, rank: int, ranks: int) -> torch.Tensor:
    """Returns the part of a cut tensor that one of ``ranks`` has; its components must not be replicated.

    Raises:
        ValueError: it is not shared out evenly.
    """
    lengths = along.components or (tensor.shape[along.dim] // along.outer,)
    inner, places = sum(lengths), []
    for outer in range(along.outer):
        begin = outer * inner
        for length in lengths:
            size, rest = divmod(length, ranks)
            if rest or any(along.heads):
                raise ValueError(f"{tuple(tensor.shape)} is not shared out evenly over {ranks}: {along}")
            places += range(begin + rank * size, begin + (rank + 1) * size)
            begin += length
    return tensor.index_select(along.dim, torch.tensor(places))


class FunctionTrials:
    """Finds out whether functions work part by part, and tries each only once."""

    def __init__(self) -> None:
        self._known: dict[Any, bool] = {}

    def works_on_shards(
        self,
        function: Function,
        args: tuple[Any, ...],
        output: Any,
        along: Callable[[torch.Tensor], ShardDim | None],
    ) -> bool:
        """Tries a function with random numbers, forward and backward.

        Args:
            args, output: arguments and output of a call on meta.
            along: returns how one of their tensors is cut; None for a whole one.

        Returns:
            Whether parts of arguments give the same parts of outputs and gradients, and gradients of whole
            arguments add up. Where no output is cut: whether output gradients that add up give such gradients.
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
    """Returns whether the parts fit the whole for one draw of numbers; None if results are not finite."""
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
    """Returns the output gradients of each rank: parts, or terms that add up where outputs are whole."""
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
