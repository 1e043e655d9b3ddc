"""Tests on ghost GPUs skip where they can't run; ``MEGASCHED_REQUIRE_GHOST=1`` makes that a failure."""

from __future__ import annotations

import pytest

from tests.ghost import process
from tests.ghost.build import library, required, why_not


def _without(missing: str) -> None:
    if required():
        pytest.fail(f"{missing} (MEGASCHED_REQUIRE_GHOST=1 forbids to skip)")
    pytest.skip(missing)


@pytest.fixture(scope="session", autouse=True)
def _ghost():
    if missing := why_not():
        _without(missing)
    library()


@pytest.fixture(scope="session")
def transformer_engine():
    """Transformer Engine with its compiled parts, which ``make ghost`` installs."""
    if not (process.TE[0] / "made_for").exists():
        _without(f"{process.TE[0]} has no Transformer Engine: `make ghost` says why")
