"""Counts the FLOPs that a definition's own code computes, from a tape of one forward, for any architecture.

Matrix products and convolutions count, by the formulas of ``torch.utils.flop_counter``: 2 FLOPs for each
multiplication with its addition. Attention through HF's registry counts only the keys that each query attends to:
those before it, or those in the layer's window. Of experts in HF's form, each token counts those that it is routed
to. A model's own attention code counts all that it computes, masked or not. Experts that a definition calls one by
one count one token each, because token values decide which of them are called.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import flop_registry

from megasched.analysis.attention_flops import attended, attention_flops
from megasched.analysis.recording.meta_call import tensors_in
from megasched.analysis.recording.tape import Call, Operation, RecordedAttention, RecordedLoss, Tape, TapeReader
from megasched.definition.experts import has_form


@dataclass
class ForwardFlops:
    """Holds the FLOPs of one forward.

    Attributes:
        layers: FLOPs of each layer and of the code that runs between it and the layer before.
        before: FLOPs before the first layer.
        after: FLOPs after the last layer.
    """

    layers: list[float]
    before: float = 0.0
    after: float = 0.0

    @property
    def total(self) -> float:
        return self.before + sum(self.layers) + self.after


def forward_flops(tape: Tape, layers: Sequence[str] = ()) -> ForwardFlops:
    """Counts the FLOPs of the forward that a tape holds.

    Args:
        tape: tape of a definition; the count is for the length of its sequences.
        layers: paths of the layers.
    """
    modules = dict(tape.model.named_modules())
    mixtures = {path: modules[path.rpartition(".")[0]] for path, module in modules.items() if has_form(module)}
    reader = _FlopCount(mixtures, layers)
    tape.read(reader)
    reader.flops.after = reader.outside
    return reader.flops


class _FlopCount(TapeReader):
    def __init__(self, mixtures: Mapping[str, nn.Module], layers: Sequence[str]) -> None:
        """Takes the path of each module of experts -> the module around it."""
        self.mixtures = mixtures
        self.flops = ForwardFlops(layers=[0.0] * len(layers))
        self.numbers = {path: number for number, path in enumerate(layers)}
        self.counted = 0  # calls that have been counted as a whole, and have not ended
        self.running: int | None = None  # the layer
        self.outside = 0.0  # since the last layer, or the begin
        self.begun = False  # any layer

    def operation(self, operation: Operation) -> None:
        formula = flop_registry.get(getattr(operation.func, "overloadpacket", None))
        if formula is not None:
            self._count(formula(*operation.args, **operation.kwargs, out_val=operation.output))

    def _count(self, flops: float) -> None:
        if self.counted:
            return
        if self.running is None:
            self.outside += flops
        else:
            self.flops.layers[self.running] += flops

    def enter(self, call: Call) -> None:
        if call.path in self.numbers:
            self._begin(self.numbers[call.path])
        if call.path in self.mixtures:
            tokens, *routing = tensors_in((call.args, call.kwargs))
            pairs = routing[0].numel() if routing else _pairs(call.module, self.mixtures[call.path], tokens)
            self._count(_of_experts(call.module, pairs))
            self.counted += 1

    def leave(self, call: Call) -> None:
        self.counted -= call.path in self.mixtures
        if call.path in self.numbers:
            self.running = None

    def _begin(self, layer: int) -> None:
        """Adds the FLOPs since the layer before to this layer, which is computed in the same place."""
        if self.begun:
            self.flops.layers[layer] += self.outside
        else:
            self.flops.before = self.outside
        self.running, self.outside, self.begun = layer, 0.0, True

    def enter_attention(self, call: RecordedAttention) -> None:
        causal = call.kwargs.get("is_causal")
        causal = getattr(call.module, "is_causal", True) if causal is None else causal
        batch, heads, queries, width = call.query.shape
        pairs = attended(queries, call.key.shape[2], bool(causal), call.kwargs.get("sliding_window"))
        self._count(attention_flops(batch * heads * pairs, width, call.value.shape[-1]))
        self.counted += 1

    def leave_attention(self, call: RecordedAttention) -> None:
        self.counted -= 1

    def enter_loss(self, call: RecordedLoss) -> None:
        """Stops counting, as the function that stands in for the loss is not part of the definition."""
        self.counted += 1

    def leave_loss(self, call: RecordedLoss) -> None:
        self.counted -= 1


def _pairs(experts: Any, mixture: nn.Module, rows: torch.Tensor) -> int:
    """Returns how many of the rows of batched experts are of tokens for which their expert was chosen.

    The others are zeros. All count where the mixture does not say how many experts a token has.
    """
    return rows.shape[0] // experts.num_experts * getattr(mixture, "top_k", experts.num_experts)


def _of_experts(module: nn.Module, pairs: int) -> float:
    """Returns the FLOPs of that many pairs of a token and an expert of its own."""
    weights = sum(p.numel() // p.shape[0] for p in module.parameters(recurse=False) if p.dim() == 3)
    return 2.0 * pairs * weights
