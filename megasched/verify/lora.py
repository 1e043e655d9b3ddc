"""Starts the LoRA adapters of a verified model with values under which all of them get gradients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from megasched.attributes import replaced
from megasched.language.lora import B
from megasched.lowering import lora as adapting
from megasched.weights import lora as weights_lora

SCALE = 0.1


@contextmanager
def telling_adapters() -> Iterator[None]:
    """Runs its body with adapters made without dropout, and with random values in ``lora_B``.

    No other run repeats the dropout, and with zeros in ``lora_B``, ``lora_A`` gets no gradient.
    """
    real = weights_lora.initial_value

    def value(name: str, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
        if not name.endswith(f".{B}.weight"):
            return real(name, shape, seed)
        generator = torch.Generator().manual_seed(weights_lora.parameter_seed(seed, name))
        return SCALE * torch.randn(shape, generator=generator)

    without_dropout = replaced(adapting, "make_dropout", lambda lora: nn.Identity())
    with replaced(weights_lora, "initial_value", value), without_dropout:
        yield
