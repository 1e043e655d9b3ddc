"""Fixtures for all tests."""

import signal
from collections.abc import Iterator

import pytest

from megasched.verify.rank_pool import RankPool


def pytest_configure() -> None:
    """A shell ignores SIGINT for what it starts in the background, and so would all that tests start and stop."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """The pool of rank processes; see ``megasched/verify/rank_pool.py`` for how a case is written."""
    pool = RankPool()
    yield pool
    pool.close()
