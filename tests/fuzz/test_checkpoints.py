"""Random checkpoints go on at another layout as on one rank, or are refused."""

from __future__ import annotations

import pytest

from tests.fuzz.checkpoints import outcomes
from tests.fuzz.flags import TYPES
from tests.fuzz.run_configs import assert_fine

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("model_type", TYPES)
def test_a_resumed_run_is_that_of_one_rank_or_refused(ranks, model_type):
    assert_fine(outcomes, ranks, model_type, 3)
