"""Which of several failed ranks gives a host its status."""

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from megasched.launch.torchrun.node import first_failure


def failure(rank, status, timestamp):
    """As torchrun notes it of a process that wrote no error file."""
    found = ProcessFailure(local_rank=rank, pid=100 + rank, exitcode=status, error_file="none")
    found.timestamp = timestamp
    return found


@pytest.mark.parametrize("status", [-9, -11, 2, 17])
def test_a_rank_that_lost_another_is_not_the_first(status):
    """Both had ended when torchrun looked, and it came to the lower one first, maybe in the second before."""
    lost, killed = failure(0, 1, 50), failure(1, status, 51)
    assert first_failure([lost, killed]) is killed


@pytest.mark.parametrize(("status", "timestamp"), [(-15, 50), (-15, 51), (-9, 80)])
def test_a_rank_that_torchrun_has_ended_is_not_the_first(status, timestamp):
    failed, ended = failure(1, 1, 50), failure(0, status, timestamp)
    assert first_failure([ended, failed]) is failed


def test_of_equal_ones_the_first_counts():
    late, early = failure(0, 1, 51), failure(1, 1, 50)
    assert first_failure([late, early]) is early
    late, early = failure(0, -9, 51), failure(1, 2, 50)
    assert first_failure([late, early]) is early
