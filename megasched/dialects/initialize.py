"""Defines ``megasched.initialize``, the door to trainers that are named by ``target``."""

from __future__ import annotations

from typing import Any

from megasched.dialects.deepspeed import engine
from megasched.errors import ConfigError
from megasched.language.schedule import Schedule

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
