"""``--log-straggler``: of two ranks one is slow, and the log says which."""

from __future__ import annotations

import logging
import time
from unittest import mock

import pytest

from megasched.verify.trainer_run import train
from tests import tiny
from tests.launch.status.runs import read_log

SCHEDULE = """
import torch
from tests.launch.test_straggler import CLOCK

def rest(module, inputs):
    if torch.distributed.get_rank() == 1:
        CLOCK.seconds += 0.25

def schedule(sch, layout):
    sch["model.layers.1.mlp"].hook("fw_pre", rest)
"""
# Two micro-batches on each rank: 500 ms an iteration. Any free port will do.
FLAGS = ["--log-straggler", "--log-interval", "2", "--straggler-ctrlr-port", "0"]


class Clock:
    """A rank's: it goes on with each look at it, and by what is slow. By the machine's any rank might be."""

    def __init__(self):
        self.seconds = 0.0

    def perf_counter(self):
        self.seconds += 0.001
        return self.seconds

    def perf_counter_ns(self):
        return int(1e9 * self.perf_counter())

    def __getattr__(self, name):
        return getattr(time, name)


CLOCK = Clock()


class Lines(logging.Handler):
    def __init__(self):
        super().__init__()
        self.found = []

    def emit(self, record):
        self.found.append(record.getMessage())


def _logged(folder, schedule):
    """What Megatron's detector logs on this rank."""
    lines, logger = Lines(), logging.getLogger("megatron.core.utils")
    logger.addHandler(lines)
    logger.setLevel(logging.INFO)
    with (
        mock.patch("megatron.core.utils.time", CLOCK),
        mock.patch("megasched.patches.host_cuda_emulation.time", CLOCK),
    ):
        train(folder, FLAGS, iterations=4, schedule=schedule)
    return lines.found


def test_the_slow_rank_is_named(ranks, tmp_path):
    schedule = tmp_path / "slow.py"
    schedule.write_text(SCHEDULE)
    of_rank_0, of_rank_1 = ranks.run(2, _logged, tiny.save("llama", tmp_path / "model"), str(schedule))
    found = read_log(of_rank_0).rank_times
    assert [(each.slowest, each.fastest) for each in found] == [(1, 0), (1, 0)]
    for each in found:
        assert 0 < each.fastest_seconds < 0.05
        assert each.slowest_seconds == pytest.approx(0.5 + each.fastest_seconds)
    assert read_log(of_rank_1).rank_times == []
