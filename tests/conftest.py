"""Fixtures for all tests."""

from collections.abc import Iterator

import pytest

from megasched.verify.rank_pool import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """The pool of rank processes; see ``megasched/verify/rank_pool.py`` for how a case is written."""
    pool = RankPool()
    yield pool
    pool.close()
