"""Tries with numbers, on a small copy of a module, whether its experts can be computed separately.

Under expert parallelism each rank computes some of the experts on the tokens that were sent to them, each pair of
a token and an expert separately, and the results are added up; under context parallelism a module gets some of the
tokens. Code may break this: drop tokens beyond a capacity, normalise the weights of a token's experts, add
something once. Batched experts, each of which gets as many rows, may mix these. Numbers beyond those of the
experts may choose ones without parameters: these are computed where the token is, so they have to return their
input or nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from megasched.definition.instances import close, gradients_of, real_tensors, tree_state, tried_once
from megasched.transformers_names import EXPERTS

if TYPE_CHECKING:
    import torch
    from torch import nn

_SCALES = (1.0, 1e-3, 30.0, 1e4)  # of tokens, so that clamps and branches are met
_TOLERANCE = 1e-5  # of the largest number; HF's grouped products are of float32 at most
_MANY = 600  # tokens of one expert, more than a capacity leaves room for
_UNTRIED = "a small copy of it can't be tried"
_NOT_IN_PARTS = "a small copy of it can't be computed in parts"
_TRIED: dict[Any, str] = {}


def why_not_apart(module: nn.Module, *, batched: bool) -> str:
    """Returns why the experts of a module can't be computed separately; empty if they can.

    See ``experts.has_form`` and ``experts.is_batched`` for the two forms.
    """
    if batched:
        return _why_not_as(module, _batches_apart, _batches)
    reason, what = _why_not_as(module, _apart, _routed), beyond(module)
    if what == "other" and (not reason or reason.startswith((_UNTRIED, _NOT_IN_PARTS))):
        return "numbers beyond its experts choose ones that do not return their input"
    return "" if what == "input" else reason


def beyond(module: nn.Module) -> Literal["nothing", "input", "other"]:
    """Returns what is added for numbers beyond those of the experts of a module in HF's form.

    If such numbers make it fail, there are none. HF's own implementations, which may run in place of a module's
    code, have none. ``input`` says as well that its experts can be computed separately.
    """
    if hasattr(module, "is_transposed") and _implementation(module) not in (None, "eager"):
        return "nothing"
    reason = _why_not_as(module, _apart_or_returned, _routed_beyond)
    if not reason:
        return "input"
    none = reason.startswith(_UNTRIED) or not _why_not_as(module, _apart, _routed_beyond)
    return "nothing" if none else "other"


def count(module: Any) -> int:
    """Returns how many experts a module has: as it says, or the shortest first axis of its parameters."""
    said = getattr(module, "num_experts", None)
    return said if isinstance(said, int) else min(_lengths(module))


def _lengths(module: nn.Module) -> list[int]:
    return [held.shape[0] for held in module._parameters.values() if held is not None]


def _implementation(module: nn.Module) -> Any:
    return getattr(getattr(module, "config", None), EXPERTS, None)


def computes_as(module: nn.Module, function: Callable[..., torch.Tensor]) -> bool:
    """Returns whether a function of a module in HF's form and its arguments computes what the module does."""
    return not _why_not_as(module, function, _routed)


def _why_not_as(module: nn.Module, other: Callable[..., torch.Tensor], inputs: Callable[..., Any]) -> str:
    state = tree_state(module)
    key = None if state is None else (state, _implementation(module), other, inputs)
    return tried_once(_TRIED, key, partial(_tried, module, other, inputs))


def _tried(
    module: nn.Module,
    other: Callable[..., torch.Tensor],
    inputs: Callable[[Any], Iterator[tuple[bool, list[torch.Tensor]]]],
) -> str:
    """Returns why the module and the other function compute other numbers.

    Args:
        inputs: yields cases for the small copy: the training flag, and what it is called with.
    """
    import torch

    from megasched.definition.undisturbed import undisturbed

    if "forward" in vars(module):
        return "it has a forward that is not its class's"
    # A plan must not change what a run draws.
    with undisturbed(module), real_tensors(), torch.random.fork_rng(devices=[]), torch.enable_grad():
        small = _small(module)
        for training, given in inputs(small):
            vars(small)["training"] = training
            reason = _why_not(small, other, given)
            if reason:
                return reason
    return ""


def _small(module: Any) -> Any:
    """Returns a copy with as many experts but small, real parameters; its attributes are adjusted to the sizes."""
    import torch

    own = {name: held for name, held in module._parameters.items() if held is not None}
    counts = {count(module), *_lengths(module)}
    sizes = _small_sizes({length for held in own.values() for length in held.shape[1:]}, counts)
    generator = torch.Generator().manual_seed(0)
    made = {
        name: torch.randn(
            held.shape[0], *(sizes[n] for n in held.shape[1:]), generator=generator, dtype=torch.float32
        )
        for name, held in own.items()
    }
    numbers = {
        name: sizes[value]
        for name, value in vars(module).items()
        if type(value) is int and value in sizes and name != "num_experts"
    }
    small = copy.copy(module)
    parameters = {**module._parameters, **{name: held.requires_grad_() for name, held in made.items()}}
    small.__dict__ = {**vars(module), **numbers, "_parameters": parameters}
    return small


def _small_sizes(lengths: Iterable[int], counts: Collection[int]) -> dict[int, int]:
    """Maps each size to that of the copy; a size that is twice another stays so, for gate and up in one tensor.

    Sizes are multiples of 8, as kernels require, where the originals are. One that is a number of experts, too,
    stays, as an attribute with this value may be either.
    """
    found: dict[int, int] = {}
    for length in sorted(lengths):
        half = found.get(length // 2) if length % 2 == 0 else None
        small = 2 * half if half is not None else min(length, 8 + 16 * len(found))
        found[length] = length if length in counts else small
    return found


def _cases(experts: int) -> Iterator[tuple[bool, float, torch.Tensor]]:
    """Yields cases: the training flag, the scale of tokens, and the experts of each token [t, k].

    Tokens use all experts, the same ones, or one each.
    """
    import torch

    chosen = min(3, experts)
    tokens = 2 * -(-experts // chosen)
    in_turn = (torch.arange(tokens * chosen) % experts).view(tokens, chosen)
    scattered = in_turn[torch.randperm(tokens, generator=torch.Generator().manual_seed(2))][:16]
    last = torch.arange(experts - 1, experts - 1 - chosen, -1)
    yield True, 1.0, in_turn
    for scale in _SCALES:
        yield True, scale, scattered
    yield True, 1.0, last.repeat(_MANY, 1)
    yield True, 1.0, scattered[:, :1]
    yield False, 1.0, scattered


def _routed(small: Any) -> Iterator[tuple[bool, list[torch.Tensor]]]:
    """Yields tokens, the experts of each, and the weights of these, which add up to anything."""

    yield from _weighted(small, _cases(count(small)))


def _routed_beyond(small: Any) -> Iterator[tuple[bool, list[torch.Tensor]]]:
    """Yields the same, with numbers beyond those of the experts among theirs, and alone; tokens have several.

    There is at least one such number, and as many as the longest parameter has entries.
    """
    import torch

    experts = count(small)
    total = max(experts + 1, *_lengths(small))
    yield from _weighted(small, (case for case in _cases(total) if case[2].shape[1] > 1))
    last = torch.arange(experts, total).repeat(2)
    yield from _weighted(small, [(True, scale, torch.stack([last, last], dim=1)) for scale in _SCALES])


def _weighted(
    small: Any, cases: Iterable[tuple[bool, float, torch.Tensor]]
) -> Iterator[tuple[bool, list[torch.Tensor]]]:
    import torch

    for training, scale, index in cases:
        generator = torch.Generator().manual_seed(1)
        hidden = scale * torch.randn(index.shape[0], _width(small), generator=generator, dtype=torch.float32)
        weights = 0.2 + torch.rand(index.shape, generator=generator, dtype=torch.float32)
        yield training, [hidden.requires_grad_(), index, weights.requires_grad_()]


def _batches(small: Any) -> Iterator[tuple[bool, list[torch.Tensor]]]:
    """Yields rows [experts * t, h]: as many for each expert, one after the other."""
    import torch

    for training, scale, tokens in (*((True, scale, 5) for scale in _SCALES), (True, 1.0, _MANY), (False, 1.0, 1)):
        generator = torch.Generator().manual_seed(1)
        shape = (small.num_experts * tokens, _width(small))
        yield training, [(scale * torch.randn(shape, generator=generator, dtype=torch.float32)).requires_grad_()]


def _why_not(small: Any, other: Callable[..., torch.Tensor], given: list[torch.Tensor]) -> str:
    import torch

    sources = [tensor for tensor in given if tensor.requires_grad]
    sources += [held for held in small._parameters.values() if held is not None]
    try:
        whole = small.forward(*given)
        if not isinstance(whole, torch.Tensor) or whole.shape != given[0].shape:
            return "it returns something else than a hidden state of each token"
    except Exception as error:  # whatever the definition's code raises
        return f"{_UNTRIED}: {type(error).__name__}: {error}"
    try:
        apart = other(small, *given)
        found, expected = (
            [torch.zeros_like(of) if one is None else one for one, of in zip(made, sources, strict=True)]
            for made in (_gradients(apart, sources), _gradients(whole, sources))
        )
    except Exception as error:
        return f"{_NOT_IN_PARTS}: {type(error).__name__}: {error}"
    if all(close(one, other, _TOLERANCE) for one, other in zip([apart, *found], [whole, *expected], strict=True)):
        return ""
    return "its experts and tokens, each half by itself, do not add up to what it computes of all together"


def _gradients(output: torch.Tensor, sources: list[torch.Tensor]) -> Sequence[torch.Tensor | None]:
    """Returns the gradients of an output, which is made of nothing where numbers choose no expert."""
    return gradients_of(output, sources) if output.requires_grad else [None] * len(sources)


def _width(small: Any) -> int:
    """Returns the hidden size of a token, read from the first matrices of experts."""
    return next(_matrices(small)).shape[1 if is_transposed(small) else 2]


def is_transposed(module: Any) -> bool:
    """Returns whether the matrices of experts are stored as [experts, in, out], by HF's form or their shapes."""
    first, *_, last = [next(_matrices(module)), *_matrices(module)]
    return getattr(module, "is_transposed", first.shape[1] == last.shape[2])


def _matrices(module: nn.Module) -> Iterator[torch.Tensor]:
    return (held for held in module._parameters.values() if held is not None and held.dim() == 3)


def _apart(
    small: Any, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, *, beside: bool = False
) -> torch.Tensor:
    """Returns the sum of the results of each half of the experts on each half of the tokens, pair by pair.

    Args:
        beside: see ``weighted_pairs``.
    """
    import torch

    tokens, choices = index.shape
    pairs = torch.arange(tokens * choices)
    whole = hidden.new_zeros(tokens * choices, hidden.shape[1])
    for first, end in _halves(count(small)):
        part = _some(small, first, end)
        for begin, stop in _halves(tokens):
            own = pairs[begin * choices : stop * choices]
            chosen = index.flatten()[own]
            here = (chosen >= first) & (chosen < end)
            own, local = own[here], chosen[here] - first
            if own.numel():
                spare = first_beyond(part, count(small)) if beside else None
                shares = weights.flatten()[own]
                results = weighted_pairs(part.forward, hidden[own // choices], local, shares, spare)
                whole = whole.index_add(0, own, results)
    return whole.view(tokens, choices, -1).sum(dim=1)


def _apart_or_returned(
    small: Any, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Returns the same, where numbers beyond the experts choose ones that return their input."""
    parts = _apart(small, hidden, index, weights, beside=True)
    return parts + returned(hidden, index, weights, count(small))


def first_beyond(module: Any, experts: int) -> int:
    """Returns the first number that chooses no expert with parameters, of a module with some of the experts."""
    return getattr(module, "num_experts", experts)


def weighted_pairs(
    forward: Callable[..., torch.Tensor],
    hidden: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
    spare: int | None = None,
) -> torch.Tensor:
    """Returns the weighted results of pairs of a token and an expert, [p, h].

    Args:
        forward: of a module in HF's form.
        hidden: [p, h].
        index: [p].
        weights: [p].
        spare: number of an expert that returns its input; it stands beside each pair's expert, with a weight of
            zero, as LongCat's code fails where each token has one expert alone.
    """
    from torch.nn.functional import pad

    if spare is None:
        return forward(hidden, index[:, None], weights[:, None])
    return forward(hidden, pad(index[:, None], (0, 1), value=spare), pad(weights[:, None], (0, 1)))


def returned(hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, experts: int) -> torch.Tensor:
    """Returns what those of the tokens' experts [t, h] add that return their input: numbers beyond the experts."""
    return hidden * (weights * (index >= experts)).sum(dim=-1, keepdim=True)


def _batches_apart(small: Any, rows: torch.Tensor) -> torch.Tensor:
    """Returns the results of each half of the experts on each half of their rows."""
    import torch

    batches, whole = rows.view(small.num_experts, -1, rows.shape[-1]), []
    for first, end in _halves(small.num_experts):
        part = _some(small, first, end)
        parts = (batches[first:end, begin:stop] for begin, stop in _halves(batches.shape[1]))
        whole.append(torch.cat([part.forward(x.flatten(0, 1)).view_as(x) for x in parts], dim=1))
    return torch.cat(whole).flatten(0, 1)


def _some(small: Any, first: int, end: int) -> Any:
    """Returns a copy with these experts alone; of what parameters have beyond the experts, it has a share.

    If the module counts its experts by names of its own, these numbers stay, as in ``lower_experts``.
    """
    part, experts = copy.copy(small), count(small)
    held = {
        name: one if one is None else _rows(one, experts, first, end) for name, one in small._parameters.items()
    }
    counted = {"num_experts": end - first} if hasattr(small, "num_experts") else {}
    part.__dict__ = {**vars(small), "_parameters": held, **counted}
    return part


def _rows(held: torch.Tensor, experts: int, first: int, end: int) -> torch.Tensor:
    import torch

    more = held.shape[0] - experts
    if not more:
        return held[first:end]
    return torch.cat([held[first:end], held[experts + more * first // experts : experts + more * end // experts]])


def _halves(count: int) -> list[tuple[int, int]]:
    """Returns the bounds of two halves, or of the whole if it can't be halved."""
    return [(0, count // 2), (count // 2, count)] if count > 1 else [(0, count)]
