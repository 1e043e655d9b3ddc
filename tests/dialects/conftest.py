"""Ranks that have DeepSpeed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.dialects.deepspeed_ranks import DeepSpeedRanks


@pytest.fixture(scope="package")
def deepspeed_ranks(pytestconfig: pytest.Config) -> Iterator[DeepSpeedRanks]:
    pool = DeepSpeedRanks(Path(pytestconfig.rootpath))
    yield pool
    pool.close()
