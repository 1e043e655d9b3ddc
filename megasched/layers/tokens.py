"""Where the sequence stands in what a linear takes and gives: Megatron's functions want it first."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from megasched.analysis.stages.hidden_state import HiddenStateArg
from megasched.layers.wrap import Forward, wrap_forward


class Tokens:
    """Tokens as definitions hand them to linears: [b, s, h], in groups [b, s, ..., h], or flattened [b*s, h].

    Attributes:
        batch: sequences in the forward that runs, which flattened tokens do not tell.
    """

    def __init__(self) -> None:
        self.batch = 1

    def sequence_first(self, x: torch.Tensor) -> torch.Tensor:
        """[s, b, h]; groups count as sequences."""
        if x.dim() == 2:
            x = x.unflatten(0, (self.batch, -1))
        return x.transpose(0, 1).flatten(1, -2)

    def as_before(self, output: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """The opposite, for an output [s, b, out] of what stood as ``x`` does; s may be another than there."""
        if x.dim() == 2:
            return output.transpose(0, 1).flatten(0, 1)
        return output.unflatten(1, (x.shape[0], *x.shape[2:-1])).transpose(0, 1)


def note_batch(layer: nn.Module, slot: HiddenStateArg, tokens: Tokens) -> None:
    """Has a layer say of how many sequences its hidden state [b, s, h] is."""

    def wrapper(forward: Forward) -> Forward:
        def watched(*args: Any, **kwargs: Any) -> Any:
            tokens.batch = slot.get(args, kwargs).shape[0]
            return forward(*args, **kwargs)

        return watched

    wrap_forward(layer, wrapper)
