"""Random numbers where activations are sharded: Megatron's model-parallel RNG state, entered at most once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class _State:
    forked: bool = False


_state = _State()


def forked() -> bool:
    """Whether random numbers are being drawn from the model-parallel state now."""
    return _state.forked


def set_forked(value: bool) -> None:
    """For recomputation, which must find the state as the first forward left it."""
    _state.forked = value


@contextmanager
def fork_rng() -> Iterator[None]:
    """Draws from the model-parallel RNG state (different on each TP rank) inside.

    Nested use stays in the outer fork: Megatron's tracker would start the same numbers over
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
