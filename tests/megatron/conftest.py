"""Ranks under a Megatron-LM checkout, beside those under the installed megatron-core."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ranks_with import RanksWith

CHECKOUT = "MEGATRON_CHECKOUT"


@pytest.fixture(scope="session")
def checkout() -> Path:
    """The checkout that `make test-megatron CHECKOUT=DIR` names."""
    assert os.environ.get(CHECKOUT), f"{CHECKOUT} is not set: make test-megatron CHECKOUT=DIR"
    folder = Path(os.environ[CHECKOUT])
    assert (folder / "megatron" / "core").is_dir(), f"{CHECKOUT}={folder}: there is no Megatron-LM"
    return folder


@pytest.fixture(scope="session")
def ranks_of_checkout(checkout: Path, pytestconfig: pytest.Config) -> Iterator[RanksWith]:
    pool = RanksWith(checkout, Path(pytestconfig.rootpath))
    yield pool
    pool.close()
