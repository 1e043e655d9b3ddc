"""Ranks that have DeepSpeed, which stands apart from the environment (requirements.txt)."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ranks_with import RanksWith

DEEPSPEED = Path(sys.prefix) / "deepspeed"


@pytest.fixture(scope="package")
def deepspeed_ranks(pytestconfig: pytest.Config) -> Iterator[RanksWith]:
    assert (DEEPSPEED / "deepspeed").is_dir(), f"no DeepSpeed in {DEEPSPEED}: make setup"
    pool = RanksWith(DEEPSPEED, Path(pytestconfig.rootpath))
    yield pool
    pool.close()
