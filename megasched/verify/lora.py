"""Adapters in what is verified start so that every number of them counts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from megasched.language.lora import B
from megasched.lowering import lora as adapting
from megasched.weights import lora as weights_lora

SCALE = 0.1


@contextmanager
def telling_adapters() -> Iterator[None]:
    """Adapters that are made now draw no dropout, which no other run repeats; and ``lora_B`` starts with numbers,
    for with zeros ``lora_A`` gets no gradient."""
    real = weights_lora.initial_value, adapting.make_dropout

    def value(name: str, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
        if not name.endswith(f".{B}.weight"):
            return real[0](name, shape, seed)
        generator = torch.Generator().manual_seed(weights_lora.parameter_seed(seed, name))
        return SCALE * torch.randn(shape, generator=generator)

    weights_lora.initial_value = value
    adapting.make_dropout = lambda lora: nn.Identity()
    try:
        yield
    finally:
        weights_lora.initial_value, adapting.make_dropout = real
