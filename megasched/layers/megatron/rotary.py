"""Computes rotary angles of Megatron's attention from the definition's own frequencies."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial

import torch
from torch import nn

from megasched.language.module_specs import AttentionSpec
from megasched.language.tensor_types import ShardDim
from megasched.layers.context_parallel import CpGroup

# (length, device) -> rotary angles [s, 1, 1, d], float32
Angles = Callable[[int, torch.device], torch.Tensor]
# (device, length) -> those of the part of the sequence that a rank has
OwnAngles = Callable[[torch.device, int], torch.Tensor]
# a layer's number -> its angles; None where it has no positions
LayerAngles = Callable[[int], OwnAngles | None]


def rotary_angles(model: nn.Module, attention: AttentionSpec, ranks: CpGroup | None) -> LayerAngles:
    """Returns the rotary angles of a definition's layers; layers with the same frequencies share them."""
    known: dict[str, Angles] = {}

    def of_layer(index: int) -> OwnAngles | None:
        if not attention.rotary or (attention.rotated and not attention.rotated[index]):
            return None
        name = attention.frequencies[index] if attention.frequencies else "inv_freq"
        if name not in known:
            frequencies = model.get_submodule(attention.rotary).get_buffer(name)
            known[name] = _angles(frequencies, attention.interleaved)
        return partial(_own_angles, known[name], ranks)

    return of_layer


def _angles(frequencies: torch.Tensor, interleaved: bool) -> Angles:
    """Returns the function for the angles of all positions, which are computed once per length."""

    @lru_cache(maxsize=2)
    def angles(length: int, device: torch.device) -> torch.Tensor:
        positions = torch.arange(length, device=device, dtype=torch.float32)
        half = torch.outer(positions, frequencies.to(device, torch.float32))
        # Each angle stands where the two features are that it rotates.
        both = half.repeat_interleave(2, dim=-1) if interleaved else torch.cat((half, half), dim=-1)
        return both[:, None, None, :]

    return angles


def _own_angles(angles: Angles, ranks: CpGroup | None, device: torch.device, length: int) -> torch.Tensor:
    """Returns the angles of the ``length`` tokens of this rank; these are all without context parallelism."""
    if ranks is None:
        return angles(length, device)
    return ranks.zigzag.local_sequence(angles(length * ranks.zigzag.size, device), ShardDim(0))
