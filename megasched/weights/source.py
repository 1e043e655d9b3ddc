"""What every source of weights answers: a rank's piece of one HF parameter."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from megasched.plan.placement import Placement


class WeightSource(Protocol):
    """Where the values of a definition's parameters come from, one parameter at a time."""

    def local(self, placement: Placement, rank: int, size: int) -> torch.Tensor:
        """What TP rank ``rank`` of ``size`` holds of the HF parameter ``placement.name``.

        Returns:
            CPU tensor in the source's dtype, shape ``placement.local_shape(size)``, contiguous, with
            memory of its own.

        Raises:
            CheckpointError: the source has no such parameter, or has it in another shape.
        """
        ...

    def buffer(self, name: str) -> torch.Tensor | None:
        """The whole value of a persistent buffer (a trained router bias, say); None: as the class made it.

        Raises:
            CheckpointError: the source has it in another shape.
        """
        ...

    def check(self, names: Collection[str]) -> None:
        """Compares the source with the definition's canonical parameter names (a tie by its first name).

        Raises:
            CheckpointError: lists every missing and every unexpected name.
        """
        ...
