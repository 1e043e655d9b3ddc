"""What forked processes give and raise comes back as if it had happened here."""

import os

import pytest

from megasched.errors import Problem, ScheduleError
from megasched.planner import forked
from megasched.planner.forked import map_forked


@pytest.fixture(params=[1, 2])
def cores(request, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(request.param)))
    return request.param


def test_results_come_in_order(cores):
    offset = 10  # a closure, which can't be pickled
    assert list(map_forked(lambda item: item + offset, [3, 1, 2])) == [13, 11, 12]


def test_other_processes_are_used_where_there_are_cores(cores):
    found = set(map_forked(lambda item: os.getpid(), range(4)))
    assert (os.getpid() in found) == (cores == 1)
    assert not forked._function


def test_an_error_keeps_its_problems(cores):
    problem = Problem("TP 3 does not divide 4 heads", "layers.0", "schedule.py:3", "use TP 2")

    def fail(item):
        raise ScheduleError(problem)

    with pytest.raises(ScheduleError) as caught:
        list(map_forked(fail, [1, 2]))
    assert caught.value.problems == [problem]
    assert "TP 3 does not divide" in str(caught.value)
