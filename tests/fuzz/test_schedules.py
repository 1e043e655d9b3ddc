"""Random schedules train as plain HF does, or are refused by the plan."""

from __future__ import annotations

import pytest

from tests.fuzz.flags import TYPES
from tests.fuzz.run_configs import assert_fine
from tests.fuzz.schedules import outcomes

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("model_type", TYPES)
def test_a_step_is_that_of_plain_hf_or_refused(ranks, model_type):
    assert_fine(outcomes, ranks, model_type, 3)
