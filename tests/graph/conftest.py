"""Fixtures of the tests of graphs."""

import pytest


@pytest.fixture
def compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    """``torch.compile`` compiles; in other tests it hands back what it is given (``tests/conftest.py``)."""
    import torch._dynamo

    monkeypatch.setattr(torch._dynamo.config, "disable", False)
