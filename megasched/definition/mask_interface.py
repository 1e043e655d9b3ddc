"""Makes the attention masks of one rank's queries under context parallelism: all keys, and true query positions.

HF makes a mask from two indices, which it counts from 0 to the length that it sees. This module replaces a query's
index by its position in the whole sequence, and extends keys to the end of that. It also masks pairs of a query
and a key in different packed sequences: HF does so only if a definition passes on its position ids.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from megasched.definition.sequence_split import Zigzag
from megasched.language.tensor_types import ShardDim

Mask = torch.Tensor | None


class _Context(NamedTuple):
    zigzag: Zigzag
    gather: Callable[[torch.Tensor, ShardDim], torch.Tensor]
    watch: Callable[[Callable[..., Any], Callable[[], Mask]], Mask]


# Of a mask's storage, which outlives a detached copy for recomputation: its version when it was made.
_CAUSAL = "megasched_causal_at_version"

_active: list[_Context | None] = [None]
_packed: list[torch.Tensor | None] = [None]


def in_context() -> bool:
    """Returns whether a definition currently runs on a part of the sequence."""
    return _active[-1] is not None


def is_causal(mask: torch.Tensor) -> bool:
    """Returns whether HF made a mask of causality alone, and nothing has been written to it since.

    Classes that HF runs with its eager attention alone (Gemma 2, gpt-oss) get such masks, which no kernel needs.
    """
    storage = mask.untyped_storage()
    whole = mask.is_contiguous() and mask.numel() * mask.element_size() == storage.nbytes()
    return whole and not mask.is_inference() and getattr(storage, _CAUSAL, None) == mask._version


def _of_causality(mask: Mask, mask_function: Callable[..., Any], options: dict[str, Any]) -> Mask:
    """Marks a mask for ``is_causal``, if it was made of causality alone."""
    from transformers.masking_utils import causal_mask_function

    alone = mask_function is causal_mask_function and options.get("attention_mask") is None
    moved = any(options.get(offset) for offset in ("q_offset", "kv_offset"))
    if mask is not None and alone and not moved and not mask.is_inference():
        setattr(mask.untyped_storage(), _CAUSAL, mask._version)
    return mask


@contextmanager
def whole_sequence() -> Iterator[None]:
    """Runs its body on the whole sequence, so that masks are HF's own."""
    _active.append(None)
    try:
        yield
    finally:
        _active.pop()


@contextmanager
def packed_masks(numbers: torch.Tensor) -> Iterator[None]:
    """Runs its body with masks that keep packed sequences apart.

    Args:
        numbers: [b, s], the number of each token's sequence.
    """
    _packed.append(numbers)
    try:
        yield
    finally:
        _packed.pop()


def _apart(mask_function: Callable[..., Any], numbers: torch.Tensor) -> Callable[..., Any]:
    def of_sequence(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return mask_function(batch, head, query, key) & (numbers[batch, query] == numbers[batch, key])

    return of_sequence


def of_queries(make: Callable[..., Mask], *, skips: bool = False) -> Callable[..., Mask]:
    """Returns a function of HF's mask interface that also works on parts of sequences and on packed sequences.

    It makes masks [b, 1, s / cp, s] inside ``context_masks``, and block-diagonal ones [b, 1, s, s] inside
    ``packed_masks``.

    Args:
        make: HF's function.
        skips: it may make none for plain causal attention, as HF's for SDPA does.
    """

    def mask(*, q_length: int, kv_length: int, mask_function: Callable[..., Any], **options: Any) -> Mask:
        context, numbers = _active[-1], _packed[-1]
        if numbers is not None:
            mask_function = _apart(mask_function, numbers)
            options["allow_is_causal_skip"] = False
        if context is None:
            made = make(q_length=q_length, kv_length=kv_length, mask_function=mask_function, **options)
            return _of_causality(made, mask_function, options)
        zigzag, gather, watch = context
        length, window, padding = q_length * zigzag.size, options.get("local_size"), options.get("attention_mask")
        may_skip = skips and options.get("allow_is_causal_skip", True) and padding is None
        if may_skip and (window is None or length < window):
            return None  # plain causal attention
        if padding is not None:  # of this rank's own tokens
            options["attention_mask"] = gather(padding.to(torch.uint8), ShardDim(1)).bool()
        options["allow_is_causal_skip"] = False

        def build() -> Mask:
            positions = zigzag.positions(q_length, options["device"])

            def at_positions(batch: Any, head: Any, query: Any, key: Any) -> Any:
                return mask_function(batch, head, positions[query], key)

            return make(q_length=q_length, kv_length=length, mask_function=at_positions, **options)

        return _of_causality(watch(mask_function, build), mask_function, options)

    return mask


@contextmanager
def context_masks(
    zigzag: Zigzag,
    gather: Callable[[torch.Tensor, ShardDim], torch.Tensor],
    watch: Callable[[Callable[..., Any], Callable[[], Mask]], Mask] = lambda function, build: build(),
) -> Iterator[None]:
    """Runs its body, a definition on a rank's part of the sequence, with masks for the queries of that part.

    This includes definitions with their own attention code, which ask for masks by HF's names.

    Args:
        gather: makes a tensor whole that is split along the sequence: the definition's own padding mask.
        watch: is given HF's function of indices and the function that builds the mask, and returns the mask.
    """
    from transformers import AttentionMaskInterface

    kept = {name: AttentionMaskInterface()[name] for name in ("sdpa", "eager")}
    for name, make in kept.items():
        AttentionMaskInterface.register(name, of_queries(make, skips=name == "sdpa"))
    _active.append(_Context(zigzag, gather, watch))
    try:
        yield
    finally:
        _active.pop()
        for name, make in kept.items():
            AttentionMaskInterface.register(name, make)
