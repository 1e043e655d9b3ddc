"""Keeps dtypes where Megatron's Float16Module casts a whole model chunk, and finds NaN values."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def keeping_precision(model: nn.Module, float32: Collection[str], following: Collection[str]) -> Iterator[None]:
    """Runs its body, in which a model may be cast or moved, and keeps the dtypes of certain tensors.

    These are the parameters and buffers in ``float32``, and buffers outside of the state. They are moved all the
    same. A rotary table in bfloat16 would be wrong at long range. HF itself computes such buffers in float32 and
    never casts them.

    Args:
        float32: names of parameters and buffers.
        following: buffers outside of the state that are cast (``buffers_following_dtype``).
    """

    def keeps(name: str, outside_of_state: bool) -> bool:
        return name in float32 or (outside_of_state and name not in following)

    parameters = [(p, p.data) for name, p in model.named_parameters() if name in float32]
    buffers = [
        (module, name, held)
        for path, module in model.named_modules()
        for name, held in module._buffers.items()
        if held is not None and keeps(f"{path}.{name}".lstrip("."), name in module._non_persistent_buffers_set)
    ]
    yield
    for parameter, before in parameters:
        if parameter.dtype != before.dtype:
            parameter.data = before.to(parameter.device)
    for module, name, before in buffers:
        after = module._buffers[name]
        if after is not None and after.dtype != before.dtype:
            module._buffers[name] = before.to(after.device)


def with_nan(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Returns the names of tensors with a NaN; without a suspect the CPU waits for a GPU only once."""
    # Infinities of both signs have a sum that is NaN, too. torch has no sum of 8-bit floats.
    sums = {
        name: value.sum().isnan()
        for name, value in tensors.items()
        if value.is_floating_point() and value.itemsize > 1 and value.numel()
    }
    suspected = torch.stack([*sums.values()]).tolist() if sums else []
    return [name for name, bad in zip(sums, suspected, strict=True) if bad and tensors[name].isnan().any()]
