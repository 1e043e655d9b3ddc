"""Tests on ghost GPUs skip where there is no C++ compiler; ``MEGASCHED_REQUIRE_GHOST=1`` makes that a failure."""

from __future__ import annotations

import os

import pytest

from tests.ghost import process
from tests.ghost.build import library, why_not


@pytest.fixture(scope="session", autouse=True)
def _ghost():
    missing = why_not()
    if missing and os.environ.get("MEGASCHED_REQUIRE_GHOST") == "1":
        pytest.fail(f"{missing} (MEGASCHED_REQUIRE_GHOST=1 forbids to skip)")
    if missing:
        pytest.skip(missing)
    library()


@pytest.fixture(scope="session")
def transformer_engine():
    """Transformer Engine with its compiled parts, which ``make ghost`` installs."""
    assert process.TE[0].is_dir(), f"{process.TE[0]} is missing: run `make ghost`"
