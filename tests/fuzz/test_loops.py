"""Random loops of the library give the numbers of plain HF, or their schedule is refused."""

from __future__ import annotations

import pytest

from tests.fuzz.flags import TYPES
from tests.fuzz.loops import outcomes
from tests.fuzz.run_configs import assert_fine

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("model_type", TYPES)
def test_a_loop_is_that_of_plain_hf_or_refused(ranks, model_type):
    assert_fine(outcomes, ranks, model_type, 4)
