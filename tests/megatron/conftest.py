"""Ranks under a Megatron-LM checkout, beside those under the installed megatron-core."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megasched.verify.ranks.pool import RankPool

CHECKOUT = "MEGATRON_CHECKOUT"


@pytest.fixture(scope="session")
def checkout() -> Path:
    """The checkout that `make test-megatron CHECKOUT=DIR` names."""
    assert os.environ.get(CHECKOUT), f"{CHECKOUT} is not set: make test-megatron CHECKOUT=DIR"
    folder = Path(os.environ[CHECKOUT])
    assert (folder / "megatron" / "core").is_dir(), f"{CHECKOUT}={folder}: there is no Megatron-LM"
    return folder


class RanksOf:
    """A pool whose ranks find the Megatron of a checkout before the installed one."""

    def __init__(self, checkout: Path, cwd: Path) -> None:
        self._first = str(checkout)
        self._pool = RankPool(cwd=cwd)
        self.plain = self._pool.plain

    def run(self, *given: Any, **named: Any) -> list[Any]:
        """As ``RankPool.run``, which hands this process's search path on."""
        before = next(place for place, path in enumerate(sys.path) if path.endswith("site-packages"))
        sys.path.insert(before, self._first)  # behind this project, whose `tests` a checkout has, too
        try:
            return self._pool.run(*given, **named)
        finally:
            sys.path.remove(self._first)

    def close(self) -> None:
        self._pool.close()


@pytest.fixture(scope="session")
def ranks_of_checkout(checkout: Path, pytestconfig: pytest.Config) -> Iterator[RanksOf]:
    pool = RanksOf(checkout, Path(pytestconfig.rootpath))
    yield pool
    pool.close()
