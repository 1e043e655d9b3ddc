"""Whether an operator of the whole is its parts put together along what a rule says, forward and backward.

The gradient of what is cut has to be the parts of the whole's; that of what is whole on every rank is the sum of
what the ranks have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from megasched.analysis.rules.follow import follow
from megasched.analysis.rules.op_call import NeedsWhole
from megasched.language.tensor_types import ON_ALL_RANKS, ShardDim

# How the outputs are cut, ranks -> what a rank hands over in the place of some leaves: sizes that it has less of.
Sizes = Callable[[list[ShardDim | None], int], Mapping[int, Any]]


@dataclass
class Example:
    """A call of an operator with tensors that are cut.

    Attributes:
        cuts: position of a tensor among the leaves of the arguments -> how it is cut.
        follows: the same of tensors that are expanded to the size of another one along its cut, and so are as
            large as that one is on a rank; the rule is told nothing of them.
        sizes: what of the arguments are sizes of the results.
        constants: positions of tensors that torch gives no gradient, such as running statistics.
        drawn: it draws random numbers, so that only the shapes can be compared.
    """

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    cuts: dict[int, ShardDim] = field(default_factory=dict)
    follows: dict[int, ShardDim] = field(default_factory=dict)
    sizes: Sizes = lambda places, ranks: {}
    ranks: int = 2
    constants: frozenset[int] = frozenset()
    drawn: bool = False

    def __str__(self) -> str:
        leaves, _ = self.leaves()
        told = [tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        return f"{self.op} {told} cut {self.cuts} over {self.ranks}"

    def leaves(self) -> tuple[list[Any], pytree.TreeSpec]:
        return pytree.tree_flatten((self.args, self.kwargs))


def part_of(tensor: torch.Tensor, along: ShardDim | None, rank: int, ranks: int) -> torch.Tensor:
    """What a rank has of a tensor; of a component of few heads several ranks have the same."""
    if along is None or along == ON_ALL_RANKS:
        return tensor
    return tensor.index_select(along.dim, _places(along, tensor.shape[along.dim], rank, ranks))


def _places(along: ShardDim, size: int, rank: int, ranks: int) -> torch.Tensor:
    lengths = along.components or (size // along.outer,)
    heads = along.heads or (0,) * len(lengths)
    found, begin = [], 0
    for _ in range(along.outer):
        for length, few in zip(lengths, heads, strict=True):
            pieces = few or ranks
            piece, rest = divmod(length, pieces)
            assert not rest, (along, size, ranks)
            start = begin + piece * (rank * pieces // ranks)
            found += range(start, start + piece)
            begin += length
    return torch.tensor(found, dtype=torch.long)


def answer(example: Example) -> list[ShardDim | None] | None:
    """How the rules say that the outputs are cut; None where the operator needs the whole."""
    leaves, spec = example.leaves()
    args, kwargs = pytree.tree_unflatten(_own(leaves), spec)
    given = pytree.tree_leaves((args, kwargs))
    known = {id(given[index]): along for index, along in example.cuts.items()}
    outputs = _tensors(example.op(*args, **kwargs))
    try:
        places = follow(example.op, args, kwargs, outputs, lambda tensor: known.get(id(tensor)))
    except NeedsWhole:
        return None
    return None if None in places or not outputs else places


def check(example: Example) -> bool:
    """Whether there was something to check, which then was right."""
    places = answer(example)
    if places is None:
        return False
    leaves, _ = example.leaves()
    whole, whole_gradients = _run(example, leaves, places, None)
    added: dict[int, torch.Tensor] = {}
    for rank in range(example.ranks):
        own, gradients = _run(example, _of_rank(example, leaves, places, rank), places, rank)
        for index, (wanted, found, along) in enumerate(zip(whole, own, places, strict=True)):
            part = part_of(wanted, along, rank, example.ranks)
            assert (part.shape, part.dtype) == (found.shape, found.dtype), f"{example}: output {index} of {rank}"
            same = example.drawn or torch.allclose(part, found, rtol=1e-6, atol=1e-8, equal_nan=True)
            assert same, f"{example}: output {index} of rank {rank} is not its part along {along}"
        for index, gradient in gradients.items():
            along = example.cuts.get(index) or example.follows.get(index)
            total = added.setdefault(index, torch.zeros(leaves[index].shape, dtype=gradient.dtype))
            if along is None:
                total += gradient
            else:
                total.index_add_(along.dim, _places(along, total.shape[along.dim], rank, example.ranks), gradient)
    for index, gradient in whole_gradients.items() if not example.drawn else ():
        told = "cut" if index in example.cuts else "whole"
        same = torch.allclose(added[index], gradient, rtol=1e-6, atol=1e-8, equal_nan=True)
        assert same, f"{example}: the gradient of argument {index}, which is {told}, does not add up"
    return True


def _of_rank(example: Example, leaves: Sequence[Any], places: list[ShardDim | None], rank: int) -> list[Any]:
    known = {**example.cuts, **example.follows}
    own = [
        part_of(leaf, known.get(index), rank, example.ranks) if isinstance(leaf, torch.Tensor) else leaf
        for index, leaf in enumerate(leaves)
    ]
    for index, value in example.sizes(places, example.ranks).items():
        own[index] = value
    return own


def _own(leaves: Sequence[Any]) -> list[Any]:
    return [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _run(
    example: Example, leaves: Sequence[Any], places: list[ShardDim | None], rank: int | None
) -> tuple[list[torch.Tensor], dict[int, torch.Tensor]]:
    """Results, and gradients of all floats among the leaves by their positions: of the sum of the results times
    numbers, of which a rank has its part, or its share of where the result is on all ranks."""
    _, spec = example.leaves()
    inputs, own = {}, _own(leaves)
    for index, leaf in enumerate(own):
        of_numbers = isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex())
        if of_numbers and index not in example.constants:
            inputs[index] = leaf.requires_grad_()
            own[index] = leaf * 1  # which may be changed in place
    args, kwargs = pytree.tree_unflatten(own, spec)
    results = _tensors(example.op(*args, **kwargs))
    total = torch.zeros(())
    for result, along in zip(results, places, strict=True):
        if not result.requires_grad:
            continue
        shape = list(result.shape)
        if rank is not None and along != ON_ALL_RANKS:
            shape[along.dim] = _whole_size(along, shape[along.dim], example.ranks)
        numbers = torch.sin(1 + torch.arange(torch.Size(shape).numel(), dtype=torch.float64)).reshape(shape)
        if rank is not None:
            share = (1 + rank) / sum(range(1 + example.ranks)) if along == ON_ALL_RANKS else 1.0
            numbers = part_of(numbers, along, rank, example.ranks) * share
            numbers = numbers / _times(along, numbers.shape, example.ranks)
        total = total + (result * numbers).sum().real
    if not total.requires_grad:
        return [result.detach() for result in results], {}
    try:
        found = torch.autograd.grad(total, list(inputs.values()), allow_unused=True, materialize_grads=True)
    except (RuntimeError, NotImplementedError) as error:
        if "derivative" not in str(error):
            raise
        return [result.detach() for result in results], {}  # torch has no formula
    return [result.detach() for result in results], dict(zip(inputs, found, strict=True))


def _whole_size(along: ShardDim, size: int, ranks: int) -> int:
    return along.outer * sum(along.components) if along.components else size * ranks


def _times(along: ShardDim, shape: Sequence[int], ranks: int) -> torch.Tensor | float:
    """How many ranks have the same of each element of a rank's part."""
    if along == ON_ALL_RANKS or not any(along.heads):
        return 1.0
    times = []
    for length, few in zip(along.components, along.heads, strict=True):
        times += [ranks / (few or ranks)] * (length // (few or ranks))
    spread = [1] * len(shape)
    spread[along.dim] = -1
    return torch.tensor(times * along.outer, dtype=torch.float64).view(spread)
