"""Saves, restores and seeds the global generators of random numbers that a definition's code may draw from."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def python_random_states() -> tuple[Any, Any]:
    """Returns the states of Python's global generator and numpy's, to be restored later."""
    numpy = sys.modules.get("numpy")
    return random.getstate(), None if numpy is None else numpy.random.get_state()


def set_python_random_states(states: tuple[Any, Any]) -> None:
    """Restores states that ``python_random_states`` returned."""
    random.setstate(states[0])
    if states[1] is not None:
        sys.modules["numpy"].random.set_state(states[1])


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Runs its body with the random numbers of a seed, the same in every process, and restores all states.

    Python's and numpy's generators begin differently in each process, so ranks would draw different numbers.

    Args:
        seed: 32 bits.
    """
    import torch

    states = python_random_states()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed the GPUs, too, for good
        random.seed(seed)
        if states[1] is not None:
            sys.modules["numpy"].random.seed(seed)
        try:
            yield
        finally:
            set_python_random_states(states)
