"""The default schedule at each level, as schedules for ``--model-schedule bench/levels.py:NAME``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megasched.language.schedule_file import register_schedule
from megasched.model_adapters.default_schedule import schedule as default_schedule

if TYPE_CHECKING:
    from megasched.language.parallel_dims import ParallelDims
    from megasched.language.schedule import Schedule


@register_schedule("leaf")
def leaf(sch: Schedule, layout: ParallelDims) -> None:
    """Each linear on its own."""
    _at_level(sch, layout, "leaf")


@register_schedule("fused")
def fused(sch: Schedule, layout: ParallelDims) -> None:
    """Columns that read one tensor by one product."""
    _at_level(sch, layout, "fused")


@register_schedule("block")
def block(sch: Schedule, layout: ParallelDims) -> None:
    """Whole layers by Megatron's."""
    _at_level(sch, layout, "block")


def _at_level(sch: Schedule, layout: ParallelDims, level: str) -> None:
    default_schedule(sch, layout)
    sch.level(level)
