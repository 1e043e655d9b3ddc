"""No operator is computed on a part of the features, or of the sequence, where it needs the whole."""

import pytest

from tests.analysis.operator_database import features_answer, sequence_answer, sweep


@pytest.mark.parametrize("number", [2, pytest.param(12, marks=pytest.mark.slow)])
@pytest.mark.parametrize("answer_of", [features_answer, sequence_answer])
def test_what_is_not_refused_is_right(answer_of, number):
    counts, faults = sweep(answer_of, number)
    assert faults == []
    # That nearly all is refused would be no proof of anything.
    assert counts["cut"] > 100 * number
    assert counts["whole"] > 300 * number
