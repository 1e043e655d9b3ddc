"""Recomputes activations with Megatron's RNG states, bit for bit as the first forward computed them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from megasched.layers import rng
from megasched.layers.batch import HasBatch, batches, with_batches
from megasched.layers.recompute.kept_state import KeptState, StateBefore


class _Snapshot:
    """Saves state at the start of the first forward, and restores it for the second.

    It holds Megatron's tracked RNG states, the state that a module's code keeps, and how many sequences there are.
    """

    def __init__(self, kept: KeptState | None) -> None:
        self.kept = kept
        self.before: StateBefore | None = None
        self.states: dict[str, Any] | None = None
        self.forked = False
        self.batches: dict[HasBatch, int] = {}

    @contextmanager
    def first(self) -> Iterator[None]:
        tracker = _tracker()
        self.states = _copied(tracker.get_states()) if tracker is not None else None
        self.forked, self.batches = rng.forked(), batches()
        self.before = None if self.kept is None else self.kept.before()
        yield
        if self.before is not None:
            self.before.called()

    @contextmanager
    def second(self) -> Iterator[None]:
        tracker = _tracker()
        kept, kept_forked = (tracker.get_states() if tracker is not None else None), rng.forked()
        rng.set_forked(self.forked)
        if tracker is not None and self.states is not None:
            tracker.set_states(_copied(self.states))
        try:
            again = nullcontext() if self.before is None else self.before.again()
            with _unlogged(), with_batches(self.batches), again:
                yield
        finally:
            rng.set_forked(kept_forked)
            if tracker is not None and kept is not None:
                tracker.set_states(kept)


def _tracker() -> Any:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    tracker = get_cuda_rng_tracker()
    return tracker if tracker.is_initialized() else None


@contextmanager
def _unlogged() -> Iterator[None]:
    """Runs its body, and drops what Megatron's routers log in it of their losses."""
    logs = sys.modules.get("megatron.core.transformer.moe.moe_logging")
    entries = [] if logs is None else list(logs.get_moe_metrics_tracker().metrics.values())
    logged = [(entry, entry.values.clone()) for entry in entries]
    try:
        yield
    finally:
        for entry, values in logged:
            entry.values = values


def _copied(states: dict[str, Any]) -> dict[str, Any]:
    """Returns tracked RNG states that stay as they are: those of ``--te-rng-tracker`` are generators."""
    return {
        name: state.clone_state() if isinstance(state, torch.Generator) else state
        for name, state in states.items()
    }


def _contexts(kept: KeptState | None) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    snapshot = _Snapshot(kept)
    return snapshot.first(), _EnteredAgain(snapshot.second)


class _EnteredAgain(AbstractContextManager[None]):
    """Makes a new context each time that it is entered: torch enters one at each backward through a forward."""

    def __init__(self, make: Callable[[], AbstractContextManager[None]]) -> None:
        self._make = make
        self._entered: list[AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        context = self._make()
        context.__enter__()
        self._entered.append(context)

    def __exit__(self, *error: Any) -> bool | None:
        return self._entered.pop().__exit__(*error)


def recompute(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Runs ``function``, which keeps no state between calls, as ``recompute_call`` does."""
    return recompute_call(None, function, args, kwargs)


def recompute_call(
    kept: KeptState | None, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Runs ``function`` without keeping its activations, which the backward pass recomputes.

    torch saves the default RNG state, ``_Snapshot`` Megatron's, and ``kept`` the state that a module's code keeps.
    The non-reentrant form takes any structure of arguments, so a block whose only inputs are integer ids still
    gets its gradients. In 8 bits Transformer Engine recomputes: it knows the scales of the first forward.
    """
    contexts = partial(_contexts, kept)
    function = partial(function, **kwargs)  # some names are those of options of checkpoint's (debug)
    if _in_fp8():
        from transformer_engine.pytorch import checkpoint as te_checkpoint

        return te_checkpoint(function, *args, use_reentrant=False, context_fn=contexts)
    return checkpoint(function, *args, use_reentrant=False, context_fn=contexts)


def _in_fp8() -> bool:
    """Returns whether a context of 8-bit training is active."""
    if "transformer_engine.pytorch" not in sys.modules:
        return False
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    return bool(FP8GlobalStateManager.is_fp8_enabled())


@contextmanager
def tracker_states() -> Iterator[None]:
    """Restores Megatron's tracked RNG states at the end of its body."""
    tracker = _tracker()
    kept = _copied(tracker.get_states()) if tracker is not None else None
    try:
        yield
    finally:
        if tracker is not None and kept is not None:
            tracker.set_states(kept)
