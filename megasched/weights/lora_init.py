"""How adapters start: as PEFT starts them, each by its own name, so the same at every layout."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import TYPE_CHECKING

from megasched.language.lora import A
from megasched.weights.random_init import parameter_seed

if TYPE_CHECKING:
    import torch

    from megasched.plan.placement import Placement
    from megasched.weights.source import WeightSource


def initial_value(name: str, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """The whole parameter of that name; float32, CPU: Kaiming's uniform for ``lora_A``, zeros for ``lora_B``."""
    import torch

    value = torch.zeros(shape)
    if name.endswith(f".{A}.weight"):
        generator = torch.Generator().manual_seed(parameter_seed(seed, name))
        torch.nn.init.kaiming_uniform_(value, a=math.sqrt(5), generator=generator)
    return value


class AdaptedSource:
    """A weight source for a model with adapters: theirs are initialised, all others come from another source.

    Args:
        base: where the weights of the model come from.
        names: of the adapters' parameters.
        seed: Megatron's ``--seed``.
    """

    def __init__(self, base: WeightSource, names: Collection[str], seed: int) -> None:
        self._base, self._names, self._seed = base, frozenset(names), seed

    def local(self, placement: Placement, rank: int, size: int) -> torch.Tensor:
        """See ``WeightSource.local``."""
        if placement.name not in self._names:
            return self._base.local(placement, rank, size)
        piece = placement.shard(initial_value(placement.name, placement.shape, self._seed), rank, size)
        return piece.clone()

    def buffer(self, name: str) -> torch.Tensor | None:
        """See ``WeightSource.buffer``."""
        return self._base.buffer(name)

    def check(self, names: Collection[str]) -> None:
        """See ``WeightSource.check``; adapters are missing nowhere."""
        self._base.check(set(names) - self._names)
