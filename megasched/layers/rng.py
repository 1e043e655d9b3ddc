"""Draws random numbers for sharded activations from Megatron's model-parallel RNG state, forked at most once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class _State:
    forked: bool = False


_state = _State()


def forked() -> bool:
    """Returns whether random numbers are currently drawn from the model-parallel state."""
    return _state.forked


def set_forked(value: bool) -> None:
    """Sets that flag for recomputation, which must find it as the first forward left it."""
    _state.forked = value


@contextmanager
def fork_rng() -> Iterator[None]:
    """Runs its body with random numbers from the model-parallel RNG state (different on each TP rank).

    Nested use stays in the outer fork: Megatron's tracker would restart the same numbers
    (megatron/core/tensor_parallel/random.py, CudaRNGStatesTracker.fork).
    """
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    tracker = get_cuda_rng_tracker()
    if _state.forked or not tracker.is_initialized():
        yield
        return
    with tracker.fork():
        _state.forked = True
        try:
            yield
        finally:
            _state.forked = False
