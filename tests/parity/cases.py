"""Which cases `make test` runs; `make test-all` runs all of them."""

from __future__ import annotations

from collections.abc import Iterable
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


def spread(rows: Iterable[Any], columns: Iterable[Any], fast: int = 1) -> list[Any]:
    """Every pair of a row and a column, as parameters.

    Args:
        fast: so many of each row are in `make test`, the columns in turn, so that each comes to it as often.
    """
    columns = tuple(columns)
    return [
        case(row, column, fast=(index - number * fast) % len(columns) < fast)
        for number, row in enumerate(rows)
        for index, column in enumerate(columns)
    ]


def refusal(schedule: str, folder: str, **layout: Any) -> str:
    """What a run of a model is refused with when it is planned, before it has ranks.

    Args:
        layout: of ``ParallelDims``.
    """
    with pytest.raises(ScheduleError) as raised:
        _ = open_session(schedule, folder, ParallelDims(**layout)).plan
    return str(raised.value)
