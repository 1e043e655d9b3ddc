"""Finds which calls of a schedule make it wrong: those without which it is right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

Call = tuple[str, str, str]  # path, what was asked for, file:line

_WITHOUT = """from megasched.language.schedule_file import find_schedule

REMOVED = {removed!r}


def schedule(sch, layout):
    find_schedule({schedule!r})(sch, layout)
    sch.records[:] = [record for record in sch.records if (record.path, str(record)) not in REMOVED]
"""


def write_without(schedule: str, removed: Sequence[Call], file: Path) -> str:
    """Writes a schedule file that does what another schedule does, but for some calls; returns its path."""
    file.write_text(_WITHOUT.format(removed={(path, asked) for path, asked, _ in removed}, schedule=schedule))
    return str(file)


def bisect_records(
    suspects: Sequence[Call], others: Sequence[Call], right_without: Callable[[Sequence[Call]], bool]
) -> tuple[Call, ...]:
    """Returns the fewest calls found without which the schedule is right; empty where none were found.

    Args:
        suspects: calls on the module where it goes wrong first.
        others: calls to look among where leaving out the suspects does not help.
        right_without: whether the schedule is right without some calls; False where it can't be planned.
    """
    for candidates in (suspects, others):
        if candidates and right_without(candidates):
            return tuple(_narrowed(list(candidates), right_without))
    return ()


def _narrowed(guilty: list[Call], right_without: Callable[[Sequence[Call]], bool]) -> list[Call]:
    """Halves the calls as long as the schedule is right without one half alone."""
    while len(guilty) > 1:
        half = len(guilty) // 2
        part = next((part for part in (guilty[:half], guilty[half:]) if right_without(part)), None)
        if part is None:
            return guilty
        guilty = part
    return guilty
