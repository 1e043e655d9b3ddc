"""Fixtures for the tests of primitives."""

import pytest
from torch import nn

from tests.language.replacing import Block
from tests.lowering.models import randomize


@pytest.fixture
def model():
    return nn.Sequential(randomize(Block()), randomize(Block(), seed=8))
