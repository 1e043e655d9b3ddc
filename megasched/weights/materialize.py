"""Fills a whole definition in one process: the unscheduled reference, and what library users need."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megasched.placement import Placement
from megasched.weights.names import canonical_names

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from megasched.weights.source import WeightSource


def materialize(
    definition: PreTrainedModel, source: WeightSource, dtype: torch.dtype | None = None
) -> PreTrainedModel:
    """Gives every parameter of the definition a real CPU tensor from the source, in place.

    Tied parameters stay one parameter, ``requires_grad`` and attributes of parameters are kept, persistent
    buffers that the source has are filled.

    Args:
        definition: unscheduled, e.g. from ``build_definition``.
        source: where the values come from.
        dtype: of the parameters; float32 when not given. Buffers keep theirs.

    Returns:
        The definition itself.

    Raises:
        CheckpointError: the source does not fit the definition.
    """
    import torch

    canonical = canonical_names(definition)
    source.check(set(canonical.values()))
    filled: dict[str, torch.nn.Parameter] = {}
    for name, first in canonical.items():
        path, _, leaf = name.rpartition(".")
        slots = definition.get_submodule(path)._parameters
        empty = slots[leaf]
        assert empty is not None
        if first not in filled:
            value = source.local(Placement(first, tuple(empty.shape)), 0, 1)
            filled[first] = torch.nn.Parameter(value.to(dtype or torch.float32), requires_grad=empty.requires_grad)
            filled[first].__dict__.update(empty.__dict__)
        slots[leaf] = filled[first]
    persistent = definition.state_dict()
    for name, buffer in definition.named_buffers():
        value = source.buffer(name) if name in persistent else None
        if value is not None:
            buffer.copy_(value)
    return definition
