"""Fixtures for all tests."""

import gc
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from megasched.verify.ranks.pool import RankPool

pytest_plugins = ["tests.suite.durations", "tests.suite.hangs", "tests.suite.lanes", "tests.suite.leaks"]


def pytest_configure() -> None:
    """A shell ignores SIGINT for what it starts in the background, and so would all that tests start and stop.
    readline tells the processes of pytest-xdist how wide a terminal is; they have none. Threads of torch's own, in
    each of so many processes, would wait for one another. Megatron's fused functions are not compiled, as in a
    rehearsal: a C++ compiler takes up to a minute for one."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for name in ("COLUMNS", "LINES"):
        os.environ.pop(name, None)
    # A machine that is busy with other things is slow in any example.
    settings.register_profile("no-clock", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("no-clock")


def pytest_collection_finish() -> None:
    """What has been imported stays; collections, thousands of them, need not look through it."""
    gc.freeze()


@pytest.fixture(scope="session")
def ranks(pytestconfig: pytest.Config) -> Iterator[RankPool]:
    """The pool of rank processes; see ``megasched/verify/ranks/pool.py`` for how a case is written."""
    # The first test that asks may be in a folder of its own, which goes away.
    pool = RankPool(cwd=Path(pytestconfig.rootpath))
    yield pool
    pool.close()


@pytest.fixture
def broken_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Makes an installed package whose compiled code does not fit; returns the folder to import it from."""

    def broken(name: str) -> Path:
        for subfolder in (tmp_path / name, tmp_path / f"{name}-2.16.0.dist-info"):
            subfolder.mkdir()
        (tmp_path / name / "__init__.py").write_text("raise OSError('lib.so: undefined symbol: f')\n")
        metadata = tmp_path / f"{name}-2.16.0.dist-info"
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 2.16.0\n")
        (metadata / "top_level.txt").write_text(name)
        monkeypatch.syspath_prepend(tmp_path)
        return tmp_path

    return broken


@pytest.fixture
def ranks_of_commands(ranks: RankPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands take the ranks that there are, in the place of a pool of their own, which takes ten seconds."""
    for owner in ("megasched.verify.ranks.pool", "megasched.verify.verify"):
        monkeypatch.setattr(f"{owner}.RankPool", lambda *given: nullcontext(ranks))
