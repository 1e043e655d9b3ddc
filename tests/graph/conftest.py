"""Fixtures of the tests of graphs."""

from collections.abc import Iterator

import pytest


@pytest.fixture
def compiling(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """``torch.compile`` compiles; in other tests it hands back what it is given (``tests/conftest.py``)."""
    import torch._dynamo

    monkeypatch.delenv("TORCHDYNAMO_DISABLE")
    with torch._dynamo.config.patch(disable=False):
        yield
