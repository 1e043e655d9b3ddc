"""How tests are shared out over the processes of pytest-xdist: whole files, longest first, in lanes.

Files whose tests start ranks, each up to four processes that compute, go to every second process of xdist, and the
others to the rest, so that two sets of ranks do not fight for the same cores. Who has nothing left helps.
Of three processes and more, the last one has the tests on Slurm and no others: they mostly wait, and with them a
core would.
"""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from xdist.scheduler import LoadScopeScheduling

from tests.suite.durations import SLURM, read_record

if TYPE_CHECKING:
    from xdist.workermanage import WorkerController

ROOT = Path(__file__).parents[2]
RANKS = re.compile(r"\bdef \w+\([^)]*\branks\b")  # the fixture
TRAINERS = ("tests/faults/", "tests/oldest/", "tests/te/", "tests/launch/test_launched_training.py")


def unit_of(nodeid: str) -> str:
    """What is handed out as a whole: a file. There is one cluster, so that Slurm's are as if they were one."""
    return SLURM if nodeid.startswith(SLURM) else nodeid.partition("::")[0]


@cache
def starts_ranks(unit: str) -> bool:
    """Whether tests keep more than one core busy; what Slurm runs mostly waits."""
    if unit == SLURM:
        return False
    return unit.startswith(TRAINERS) or RANKS.search((ROOT / unit).read_text()) is not None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Longest first, by the last record; what is not in it may be long."""
    seconds: Counter[str] = Counter()
    for file, entry in read_record().items():
        seconds[unit_of(file)] += entry.seconds
    items.sort(key=lambda item: (unit_of(item.nodeid) in seconds, -seconds[unit_of(item.nodeid)]))


class Lanes(LoadScopeScheduling):
    """Hands out files in the order of their collection, those with ranks to every second process."""

    def _split_scope(self, nodeid: str) -> str:
        return unit_of(nodeid)

    def _assign_work_unit(self, node: WorkerController) -> None:
        unit = self._next_unit(int(node.gateway.id.removeprefix("gw")))
        if unit is None:
            node.shutdown()
            return
        self.workqueue.move_to_end(unit, last=False)  # it takes the first
        super()._assign_work_unit(node)

    def _next_unit(self, number: int) -> str | None:
        """What the process of this number is to run: the first of its own kind, or else of any."""
        units = list(self.workqueue)
        if self.numnodes > 2:
            if number == self.numnodes - 1:
                return SLURM if SLURM in units else None
            units = [unit for unit in units if unit != SLURM] or units
        return min(units, key=lambda unit: starts_ranks(unit) != (number % 2 == 0))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Lanes:
    config.option.loadscopereorder = False  # those with the most tests would come first, not the longest
    return Lanes(config, log)
