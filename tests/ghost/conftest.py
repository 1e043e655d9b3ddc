"""Tests on ghost GPUs skip where they can't run; ``MEGASCHED_REQUIRE_GHOST=1`` makes that a failure."""

from __future__ import annotations

import pytest

from tests.ghost import process, te
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


@pytest.fixture
def oldest_transformer_engine(monkeypatch):
    """The oldest one that megasched takes, in the place of the usual one; made in some minutes, once."""
    folder = process.TE[0].with_name("ghost-te-oldest")
    folder.mkdir(exist_ok=True)
    te.install(folder, te.oldest())
    monkeypatch.setattr(process, "TE", (folder, *process.TE[1:]))
