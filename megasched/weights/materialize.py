"""Fills a whole definition in one process: the unscheduled reference, and what library users need."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from megasched.errors import CheckpointError
from megasched.plan.placement import Placement
from megasched.weights.names import canonical_names

if TYPE_CHECKING:
    import torch
    from torch import nn
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
    fill_buffers(definition, source, [name for name, _ in definition.named_buffers() if name in persistent])
    return definition


def fill_buffers(
    definition: nn.Module,
    source: WeightSource,
    names: Iterable[str],
    renamed: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Gives buffers what the source has; the others are as the class made them.

    Args:
        names: of persistent buffers, before the definition was lowered.
        renamed: name in the lowered definition -> name before, where it differs.

    Raises:
        CheckpointError: the class made a buffer of weights, which had no values, and the source has none.
    """
    values = {name: value for name in names if (value := source.buffer(name)) is not None}
    for path, module in definition.named_modules():
        for name, buffer in module._buffers.items():
            full = f"{path}.{name}" if path else name
            value = values.get(renamed.get(full, full))
            if buffer is None or (value is None and not buffer.is_meta):
                continue
            if value is None:
                raise CheckpointError(
                    f"{renamed.get(full, full)} is a buffer that the class makes of its weights, and none of the "
                    "weights to start from has it: start from weights that do, without --hf-random-init"
                )
            module._buffers[name] = value.to(buffer.dtype) if buffer.is_meta else buffer.copy_(value)
