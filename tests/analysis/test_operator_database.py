"""No operator is computed on a part of the features, or of the sequence, where it needs the whole."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.analysis.operator_database import features_answer, sequence_answer, sweep


@pytest.mark.parametrize("number", [1, pytest.param(12, marks=pytest.mark.slow)])
@pytest.mark.parametrize("answer_of", [features_answer, sequence_answer])
def test_what_is_not_refused_is_right(answer_of, number):
    # torch walks up the stack for each sample, which takes most of the time below pytest; a thread has its own.
    with ThreadPoolExecutor(1) as thread:
        counts, faults = thread.submit(sweep, answer_of, number).result()
    assert faults == []
    # That nearly all is refused would be no proof of anything.
    assert counts["cut"] > 100 * number
    assert counts["whole"] > 300 * number
