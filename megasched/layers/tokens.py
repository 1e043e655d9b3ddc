"""Moves the sequence to the first dimension of a linear's input, as Megatron's functions need it, and back."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from megasched.analysis.stages.hidden_state import HiddenStateArg
from megasched.layers.batch import HasBatch
from megasched.layers.wrap import Forward, wrap_forward


class Tokens(HasBatch):
    """Converts the shapes of tokens that definitions pass to linears: [b, s, h], [b, s, ..., h] or [b*s, h]."""

    def sequence_first(self, x: torch.Tensor) -> torch.Tensor:
        """Returns [s, b, h]; dimensions between s and h are merged into b."""
        if x.dim() == 2:
            x = x.unflatten(0, (self.batch, -1))
        return x.transpose(0, 1).flatten(1, -2)

    def as_before(self, output: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Returns an output [s, b, out] in the shape of the input ``x``; s may have changed."""
        if x.dim() == 2:
            return output.transpose(0, 1).flatten(0, 1)
        return output.unflatten(1, (x.shape[0], *x.shape[2:-1])).transpose(0, 1)


def note_batch(layer: nn.Module, slot: HiddenStateArg, dim: int, tokens: Tokens) -> None:
    """Makes a layer store the batch size of its hidden state in ``tokens``: [..., b, s, h], with s at ``dim``."""

    def watched(forward: Forward, /, *args: Any, **kwargs: Any) -> Any:
        tokens.batch = slot.get(args, kwargs).shape[dim - 1]
        return forward(*args, **kwargs)

    wrap_forward(layer, watched)
