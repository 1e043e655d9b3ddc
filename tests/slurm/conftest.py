"""A Slurm for the tests in this folder, started by the first one that asks for it.

Where there can be none, the tests are skipped, and the reason says how to get one. With
``MEGASCHED_REQUIRE_SLURM=1`` that is a failure, so that nobody mistakes skipped tests for passed ones.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import tiny
from tests.slurm.config import Cluster
from tests.slurm.install import UnavailableError, provide
from tests.slurm.lab import Lab


@pytest.fixture(scope="session")
def slurm() -> None:
    """Slurm's programs, and the right to run them."""
    try:
        provide()
    except UnavailableError as error:
        if os.environ.get("MEGASCHED_REQUIRE_SLURM") == "1":
            pytest.fail(f"{error} (MEGASCHED_REQUIRE_SLURM=1 forbids to skip)")
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def lab(slurm: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """Eight nodes of eight GPUs."""
    with Lab(Cluster(tmp_path_factory.mktemp("slurm"))) as lab:
        yield lab


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of all trainings."""
    return Path(tiny.save("llama", tmp_path_factory.mktemp("model")))


@pytest.fixture(autouse=True)
def _mended(request: pytest.FixtureRequest) -> Iterator[None]:
    """Each test leaves the lab as it found it."""
    yield
    if "lab" in request.fixturenames:
        request.getfixturevalue("lab").reset()
