"""Which cases `make test` runs; `make test-all` runs all of them."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import pytest

from megasched.errors import ScheduleError
from megasched.language.parallel_dims import ParallelDims
from megasched.trainer.session import open_session


def slow(*values: Any) -> Any:
    """Parameters of a case that `make test` leaves out."""
    return pytest.param(*values, marks=pytest.mark.slow)


def case(*values: Any, fast: bool) -> Any:
    return pytest.param(*values) if fast else slow(*values)


def spread(
    rows: Iterable[Any], columns: Iterable[Any], fast: int = 1, twins: Container[Any] = frozenset()
) -> list[Any]:
    """Every pair of a row and a column, as parameters.

    Args:
        fast: so many of each row are in `make test`, the columns in turn, so that each comes to it as often.
        twins: rows that go the way of others, and are in `make test-all` alone.
    """
    columns, found, number = tuple(columns), [], 0
    for row in rows:
        twin = row in twins
        for index, column in enumerate(columns):
            found.append(case(row, column, fast=not twin and (index - number * fast) % len(columns) < fast))
        number += not twin
    return found


def refusal(schedule: str, folder: str, **layout: Any) -> str:
    """What a run of a model is refused with when it is planned, before it has ranks.

    Args:
        layout: of ``ParallelDims``.
    """
    with pytest.raises(ScheduleError) as raised:
        _ = open_session(schedule, folder, ParallelDims(**layout)).plan
    return str(raised.value)
