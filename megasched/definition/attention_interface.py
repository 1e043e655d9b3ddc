"""Registers the attention functions of a run in transformers' registry, under names of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from megasched.definition.mask_interface import of_queries
from megasched.errors import MegaschedError

NAME = "megasched"
EAGER_MASK = "megasched_eager_mask"
NAMES = (NAME, EAGER_MASK)
# Arguments that say nothing about attention itself; a definition hands on what its forward was called with.
HARMLESS = frozenset(
    [
        *("position_ids", "cache_position", "input_ids", "token_type_ids", "labels", "logits_to_keep"),
        *("shift_labels", "num_items_in_batch"),  # of losses, and handed on with the rest
        *("use_cache", "output_attentions", "output_hidden_states", "output_router_logits", "return_dict"),
        *("cu_seq_lens_k", "max_length_k"),  # what cu_seq_lens_q and max_length_q are
    ]
)


def register(function: Callable[..., Any]) -> None:
    """Registers a function as an attention implementation of transformers, with HF's masks for SDPA or eager."""
    from transformers import AttentionInterface, AttentionMaskInterface

    for name in NAMES:
        AttentionInterface.register(name, function)
    masks = AttentionMaskInterface()
    AttentionMaskInterface.register(NAME, of_queries(masks["sdpa"], skips=True))
    AttentionMaskInterface.register(EAGER_MASK, of_queries(masks["eager"]))


def registered() -> Callable[..., Any]:
    """Returns the registered function of a run, or one that raises an error if there is none."""
    from transformers import AttentionInterface

    function: Callable[..., Any] = AttentionInterface().get(NAME, _missing)
    return function


def _missing(*args: Any, **kwargs: Any) -> NoReturn:
    raise MegaschedError(f"attention is called by the name {NAME!r}, and no function was registered for it")


@contextmanager
def use_attention(function: Callable[..., Any]) -> Iterator[None]:
    """Runs its body with another attention function, for the duration of a trial."""
    from transformers import AttentionInterface

    before = registered()
    for name in NAMES:
        AttentionInterface.register(name, function)
    try:
        yield
    finally:
        for name in NAMES:
            AttentionInterface.register(name, before)
