"""Fixtures for all tests, and how they are shared out over processes."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megasched.verify.rank_pool import RankPool

SLURM = "tests/slurm/"


def pytest_configure() -> None:
    """A shell ignores SIGINT for what it starts in the background, and so would all that tests start and stop.
    readline tells the processes of pytest-xdist how wide a terminal is; they have none."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for name in ("COLUMNS", "LINES"):
        os.environ.pop(name, None)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slurm's first: its nights mostly wait, a quarter of an hour long, and others run beside them."""
    items.sort(key=lambda item: not item.nodeid.startswith(SLURM))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A process gets whole files, whose fixtures cost minutes; one gets all of Slurm's: there is one cluster."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return SLURM if nodeid.startswith(SLURM) else nodeid.partition("::")[0]

    config.option.loadscopereorder = False  # those with the most tests would come first, not the longest
    return ByFile(config, log)


@pytest.fixture(scope="session")
def ranks(pytestconfig: pytest.Config) -> Iterator[RankPool]:
    """The pool of rank processes; see ``megasched/verify/rank_pool.py`` for how a case is written."""
    # The first test that asks may be in a folder of its own, which goes away.
    pool = RankPool(cwd=Path(pytestconfig.rootpath))
    yield pool
    pool.close()
