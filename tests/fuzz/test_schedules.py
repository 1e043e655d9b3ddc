"""Random schedules train as plain HF does, or are refused by the plan."""

from __future__ import annotations

from itertools import islice

import pytest

from tests.fuzz.flags import TYPES
from tests.fuzz.run_configs import FINE
from tests.fuzz.schedules import outcomes

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("model_type", TYPES)
def test_a_step_is_that_of_plain_hf_or_refused(ranks, model_type):
    for told, outcome in islice(outcomes(ranks, [model_type], seed=7), 3):
        assert outcome.verdict in FINE, f"{told}: {outcome.why}"
