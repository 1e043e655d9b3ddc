"""Fixtures of several files here."""

from __future__ import annotations

from functools import cache

import pytest

from tests.parity.levels import SCHEDULE
from tests.parity.mixtures import small_model


@pytest.fixture
def block(tmp_path):
    """A schedule file: everything by default, some layers as blocks."""

    def write(where="model.layers.*", level="block"):
        path = tmp_path / "block.py"
        path.write_text(SCHEDULE.format(where=where, level=level))
        return str(path)

    return write


@pytest.fixture(scope="module")
def small_models(ranks, tmp_path_factory):
    """Folder of ``small_model``, made when first asked for."""

    @cache
    def get(model_type: str) -> str:
        return ranks.run(1, small_model, model_type, str(tmp_path_factory.mktemp(model_type)), {})[0]

    return get
