"""Tiny models for tests in library mode: every parameter random, the same on every rank."""

from typing import Any

import torch
from torch import nn

from megasched.model_adapters.default_schedule import schedule
from tests import tiny

VOCABULARY = 99  # divides by neither 2 nor 4: the padded rows are always there


def randomize(model: nn.Module, seed: int = 7) -> nn.Module:
    """Fills every parameter, norms and biases too, so that no term of a gradient is zero by chance."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model


def tiny_config(family: str, **changes: Any) -> Any:
    layers = "n_layer" if family == "gpt2" else "num_hidden_layers"
    return tiny.config(family, **{layers: 2, **changes})


def tiny_model(family: str, **changes: Any) -> Any:
    """A real HF causal language model of two layers in training mode, float32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(tiny_config(family, **changes), dtype=torch.float32)
    return randomize(model).train()


def auto(sch: Any) -> None:
    """Fills a schedule as ``auto`` does."""
    schedule(sch, sch.layout)


def token_ids(batch: int = 2, length: int = 12, vocabulary: int = VOCABULARY) -> torch.Tensor:
    """[batch, length] int64, without the first ids, which some configs pad with."""
    generator = torch.Generator().manual_seed(11)
    return torch.randint(4, vocabulary, (batch, length), generator=generator)


class Mlp(nn.Module):
    """No HF model: [b, s, 8] -> [b, s, 8] through 16 features."""

    def __init__(self, dropout: float = 0.0, bias: bool = True) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16, bias=bias)
        self.act = nn.GELU()
        self.drop = nn.Dropout(dropout)
        self.down = nn.Linear(16, 8, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.drop(self.act(self.up(x))))
