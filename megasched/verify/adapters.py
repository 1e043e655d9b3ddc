"""Adapters in what is verified: the unscheduled model gets those of the schedule, and both start so that every
number of them counts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from megasched.lora import B, adapted, adapter_names
from megasched.records import Record

if TYPE_CHECKING:
    import torch

    from megasched.weights.source import WeightSource

SCALE = 0.1


@contextmanager
def telling_adapters() -> Iterator[None]:
    """Adapters that are made now draw no dropout, which no other run repeats; and ``lora_B`` starts with numbers,
    for with zeros ``lora_A`` gets no gradient."""
    import torch
    from torch import nn

    from megasched.lowering import adapting
    from megasched.weights import lora_init

    real = lora_init.initial_value, adapting.make_dropout

    def value(name: str, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
        if not name.endswith(f".{B}.weight"):
            return real[0](name, shape, seed)
        generator = torch.Generator().manual_seed(lora_init.parameter_seed(seed, name))
        return SCALE * torch.randn(shape, generator=generator)

    lora_init.initial_value = value
    adapting.make_dropout = lambda lora: nn.Identity()
    try:
        yield
    finally:
        lora_init.initial_value, adapting.make_dropout = real


def adapt_definition(definition: Any, source: WeightSource, records: Sequence[Record], seed: int) -> WeightSource:
    """Adapts a definition on meta in place; returns a source that has the adapters, too.

    Args:
        records: calls of ``adapt`` and ``unfreeze``; without any nothing is changed.
    """
    from megasched.layout import Layout
    from megasched.lowering.adapting import adapt_modules
    from megasched.schedule import create_schedule
    from megasched.weights.lora_init import AdaptedSource

    if not records:
        return source
    schedule = create_schedule(definition, Layout())
    schedule.records.extend(records)
    adapt_modules(schedule, definition)
    return AdaptedSource(source, adapter_names(adapted(records)), seed)
