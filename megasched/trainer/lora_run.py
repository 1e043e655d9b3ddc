"""What LoRA changes about a run: where the adapters' weights come from, and what its log says."""

from __future__ import annotations

from typing import Any

from megasched.language.lora import adapted, adapter_names
from megasched.language.schedule import Schedule
from megasched.weights.lora_init import AdaptedSource
from megasched.weights.source import WeightSource


def with_adapters(source: WeightSource, schedule: Schedule, seed: int) -> WeightSource:
    """A source that has the adapters of a run's schedule, too; the same where there are none."""
    paths = adapted(schedule.records)
    return AdaptedSource(source, adapter_names(paths), seed) if paths else source


def parameter_counts(model: Any) -> tuple[int, int]:
    """(parameters of a definition, those of them that are trained); ties once."""
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    return sum(size for size, _ in sizes), sum(size for size, trained in sizes if trained)


def tell_of_adapters(schedule: Schedule, model: Any, rank: int) -> None:
    """How much of the model is trained."""
    count = len(adapted(schedule.records))
    if count and rank == 0:
        whole, trained = parameter_counts(model)
        print(
            f"megasched: LoRA on {count} linears: {trained:,} of {whole:,} parameters are trained "
            f"({trained / whole:.2%})"
        )
