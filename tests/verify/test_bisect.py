"""Which calls are found guilty, given what is right without which."""

import hypothesis.strategies as st
from hypothesis import given

from megasched.verify.locate.bisect import bisect_records

CALLS = [(f"module.{index}", f"module.{index}: hook()", "mine.py:1") for index in range(12)]


@given(st.sets(st.sampled_from(CALLS), min_size=1, max_size=3), st.integers(0, 12))
def test_what_is_found_guilty_is_so(guilty, split):
    asked = []

    def right_without(calls):
        asked.append(set(calls))
        return guilty <= set(calls)

    suspects, others = CALLS[:split], CALLS[split:]
    found = bisect_records(suspects, others, right_without)
    one_list = guilty <= set(suspects) or guilty <= set(others)
    assert bool(found) == one_list
    if found:
        assert guilty <= set(found)
    if found and len(guilty) == 1:
        assert set(found) == guilty
    assert len(asked) <= 2 + 2 * 4


def test_nothing_is_guilty_where_nothing_helps():
    assert bisect_records(CALLS[:4], CALLS[4:], lambda calls: False) == ()
    assert bisect_records([], [], lambda calls: True) == ()
