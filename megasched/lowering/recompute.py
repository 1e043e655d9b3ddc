"""Activation recompute with Megatron's RNG states: bit for bit what the first forward computed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch.utils.checkpoint import checkpoint

from megasched.lowering import rng


class _Snapshot:
    """Megatron's tracked RNG states at the start of the first forward, put back around the second."""

    def __init__(self) -> None:
        self.states: dict[str, Any] | None = None
        self.forked = False

    @contextmanager
    def first(self) -> Iterator[None]:
        tracker = _tracker()
        self.states = tracker.get_states() if tracker is not None else None
        self.forked = rng.forked()
        yield

    @contextmanager
    def second(self) -> Iterator[None]:
        tracker = _tracker()
        kept, kept_forked = (tracker.get_states() if tracker is not None else None), rng.forked()
        rng.set_forked(self.forked)
        if tracker is not None and self.states is not None:
            tracker.set_states(self.states)
        try:
            yield
        finally:
            rng.set_forked(kept_forked)
            if tracker is not None and kept is not None:
                tracker.set_states(kept)


def _tracker() -> Any:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    tracker = get_cuda_rng_tracker()
    return tracker if tracker.is_initialized() else None


def _contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    snapshot = _Snapshot()
    return snapshot.first(), snapshot.second()


def recompute(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Runs ``function`` without keeping its activations; they are computed again in the backward pass.

    The default RNG state is kept by torch, Megatron's by ``_Snapshot``. The non-reentrant form takes any
    structure of arguments, so a block that is fed integer ids alone still gets its gradients. In 8 bits
    Transformer Engine recomputes: it knows the scales of the first forward.
    """
    if _in_fp8():
        from transformer_engine.pytorch import checkpoint as te_checkpoint

        return te_checkpoint(function, *args, use_reentrant=False, context_fn=_contexts, **kwargs)
    return checkpoint(function, *args, use_reentrant=False, context_fn=_contexts, **kwargs)


def _in_fp8() -> bool:
    """Whether a context of 8-bit training is entered now."""
    if "transformer_engine.pytorch" not in sys.modules:
        return False
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    return bool(FP8GlobalStateManager.is_fp8_enabled())


@contextmanager
def tracker_states() -> Iterator[None]:
    """Puts Megatron's tracked random states back as they were before."""
    tracker = _tracker()
    kept = tracker.get_states() if tracker is not None else None
    try:
        yield
    finally:
        if tracker is not None and kept is not None:
            tracker.set_states(kept)
