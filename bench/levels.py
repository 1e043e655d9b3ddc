"""The default schedule at each level, as schedules for ``--model-schedule bench/levels.py:NAME``."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from megasched.model_adapters.default_schedule import schedule as default_schedule
from megasched.primitives.level import LEVELS
from megasched.schedule_file import register_schedule

if TYPE_CHECKING:
    from megasched.layout import Layout
    from megasched.schedule import Schedule


def at_level(sch: Schedule, layout: Layout, level: str) -> None:
    """What ``auto`` does, all of it at one level."""
    default_schedule(sch, layout)
    sch["model.layers"].level(level)


for _name in LEVELS:
    register_schedule(_name)(partial(at_level, level=_name))
