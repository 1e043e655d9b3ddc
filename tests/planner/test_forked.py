"""What forked processes give and raise comes back as if it had happened here."""

import os
import subprocess
import sys

import pytest

from megasched.errors import Problem, ScheduleError
from megasched.planner.measure.forked import map_forked


@pytest.fixture(params=[1, 2])
def cores(request, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(request.param)))
    return request.param


def test_results_come_in_order(cores):
    offset = 10  # a closure, which can't be pickled
    assert list(map_forked(lambda item: item + offset, [3, 1, 2])) == [13, 11, 12]


# In a process of its own: whether this one forks depends on whether a test before went backward.
PROCESSES_USED = """
import os, sys
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from megasched.planner.measure import forked

cores, backward_first = int(sys.argv[1]), sys.argv[2] == "backward"
os.sched_getaffinity = lambda process: set(range(cores))
if backward_first:
    with FakeTensorMode():  # from here on there is a device of CUDA, for which autograd starts a thread
        pass
    torch.ones(1, requires_grad=True).backward()
found = list(forked.map_forked(lambda item: os.getpid(), range(4)))
assert len(found) == 4 and not forked._function
print("here" if set(found) == {os.getpid()} else "elsewhere" if os.getpid() not in found else "both")
"""


@pytest.mark.parametrize(
    ("cores", "before", "where"),
    [(1, "nothing", "here"), (2, "nothing", "elsewhere"), (2, "backward", "here")],
)
def test_other_processes_are_used_where_there_are_cores_and_autograd_works_in_them(cores, before, where):
    command = [sys.executable, "-c", PROCESSES_USED, str(cores), before]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.strip()) == (0, where), done.stderr


def test_an_error_keeps_its_problems(cores):
    problem = Problem("TP 3 does not divide 4 heads", "layers.0", "schedule.py:3", "use TP 2")

    def fail(item):
        raise ScheduleError(problem)

    with pytest.raises(ScheduleError) as caught:
        list(map_forked(fail, [1, 2]))
    assert caught.value.problems == [problem]
    assert "TP 3 does not divide" in str(caught.value)
