"""Collects the arguments that a definition passes to its layers besides the hidden state, with real values."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from megasched.analysis.recording.recorder import Enough
from megasched.analysis.stages.layer_stack import LayerStack
from megasched.layers.megatron.small_copy import copy_tree

# Index of a layer -> its positional and keyword arguments
Calls = dict[int, tuple[tuple[Any, ...], dict[str, Any]]]
_TOKEN = 5


class _Caller(nn.Module):
    """Stands in for a layer, records its arguments, and returns the hidden state unchanged."""

    def __init__(self, old: nn.Module, index: int, structure: LayerStack, calls: Calls, last: int) -> None:
        super().__init__()
        for name, value in vars(old).items():  # the model may read them off its layers (attention_type)
            if isinstance(value, str | int | float) and name not in vars(self):
                setattr(self, name, value)
        self.note = lambda *call: calls.setdefault(index, call)
        self.slot, self.index, self.last = structure.slot, index, last

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.note(args, kwargs)
        if self.index == self.last:
            raise Enough
        return self.slot.wrap(self.slot.get(args, kwargs))


def layer_calls(model: Any, structure: LayerStack, other: Mapping[int, Any], batch: int, length: int) -> Calls:
    """Returns the calls of a model's layers, made by its own code around them; tensors on meta are zeros.

    Args:
        other: id of a config of the model -> its replacement.
        batch, length: of the input, which repeats one token.
    """
    calls: Calls = {}
    layers = {
        id(layer): _Caller(layer, index, structure, calls, structure.last)
        for index in range(structure.count)
        for layer in [model.get_submodule(structure.layer_path(index))]
    }
    around = copy_tree(model, {**other, **layers})
    for module in around.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is not None and tensor.is_meta:
                    held[name] = torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)
    ids = torch.full((batch, length), _TOKEN)
    with suppress(Enough), torch.no_grad():
        around(input_ids=ids, use_cache=False)
    return calls
