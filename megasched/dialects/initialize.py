"""Defines ``megasched.initialize`` and ``megasched.build``, the doors to a built model and to its trainer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, overload

from torch import nn

from megasched.dialects.deepspeed import engine
from megasched.errors import ConfigError
from megasched.language.schedule import Schedule
from megasched.lowering import build as lowering
from megasched.weights.random_init import Initialiser

TARGETS = ("deepspeed",)


def initialize(schedule: Schedule, *, target: str, **options: Any) -> Any:
    """Builds a scheduled model and hands it to a trainer; returns what that trainer's own ``initialize`` returns.

    Args:
        schedule: schedule of a whole model; one that is built already is taken as it is.
        target: ``deepspeed``, whose options and errors are those of ``dialects/deepspeed/engine.py:initialize``.

    Raises:
        ConfigError: there is no such target, or an option can't be used with a scheduled model.
        ScheduleError: with every problem found; the model is unchanged then.
    """
    if target not in TARGETS:
        raise ConfigError(f"target={target!r}: it is one of {', '.join(TARGETS)}")
    return engine.initialize(schedule, **options)


@overload
def build(
    schedule: Schedule, *, inputs: Mapping[str, Any] | None = None, init_weights: Initialiser | None = None
) -> nn.Module: ...
@overload
def build(schedule: Schedule, *, target: str, **options: Any) -> tuple[Any, Any]: ...
def build(schedule: Schedule, *, target: str | None = None, **options: Any) -> Any:
    """Carries out a schedule on its model and returns the model, with its own signature and outputs.

    Real weights keep their values: they are sharded as they are, never re-initialised, untied or unfrozen. Weights
    deferred by ``init_empty_weights`` stay deferred.

    Args:
        schedule: schedule of any module, HF or not.
        inputs: example keyword arguments of the model's forward, from which the communication is derived (their
            values do not matter). An HF model that takes token ids or images needs none.
        init_weights: fills deferred weights after the build, each rank its shards: a function of each module, as
            for ``nn.Module.apply``, which sees whole modules. Values follow from ``torch.initial_seed()`` and a
            parameter's name at every layout, so seed all ranks alike.
        target: a trainer of ``initialize``, which takes the ``options``; returns its engine and its optimizer.

    Raises:
        ScheduleError: with every problem found; the model is unchanged then.
        ConfigError: ``init_weights`` is given, and weights are not deferred, or it leaves some uninitialised. The
            first forward raises it where DDP or FSDP2 replicates the model over other than data-parallel ranks.
    """
    if target is None:
        return lowering.build(schedule, **options)
    made, optimizer, *_ = initialize(schedule, target=target, **options)
    return made, optimizer
