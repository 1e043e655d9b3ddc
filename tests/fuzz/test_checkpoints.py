"""Random checkpoints go on at another layout as on one rank, or are refused."""

from __future__ import annotations

from itertools import islice

import pytest

from tests.fuzz.checkpoints import outcomes
from tests.fuzz.flags import TYPES
from tests.fuzz.run_configs import FINE

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("model_type", TYPES)
def test_a_resumed_run_is_that_of_one_rank_or_refused(ranks, model_type):
    for told, outcome in islice(outcomes(ranks, [model_type], seed=7), 3):
        assert outcome.verdict in FINE, f"{told}: {outcome.why}"
