"""``--log-straggler``: of two ranks one is slow, and the log says which."""

from __future__ import annotations

import logging

from megasched.launch.status.training_log import read_log
from megasched.verify.trainer_run import train
from tests import tiny

SCHEDULE = """
import time, torch

def rest(module, inputs):
    if torch.distributed.get_rank() == 1:
        time.sleep(0.25)

def schedule(sch, layout):
    sch["model.layers.1.mlp"].hook("fw_pre", rest)
"""
# Two micro-batches on each rank: 500 ms an iteration. Any free port will do.
FLAGS = ["--log-straggler", "--log-interval", "2", "--straggler-ctrlr-port", "0"]


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
    train(folder, FLAGS, iterations=4, schedule=schedule)
    return lines.found


def test_the_slow_rank_is_named(ranks, tmp_path):
    schedule = tmp_path / "slow.py"
    schedule.write_text(SCHEDULE)
    of_rank_0, of_rank_1 = ranks.run(2, _logged, tiny.save("llama", tmp_path / "model"), str(schedule))
    found = read_log(of_rank_0).rank_times
    assert [(each.slowest, each.fastest) for each in found] == [(1, 0), (1, 0)]
    assert all(each.slowest_seconds >= 0.5 > each.fastest_seconds > 0 for each in found)
    assert read_log(of_rank_1).rank_times == []
