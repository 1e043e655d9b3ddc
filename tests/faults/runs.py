"""Real runs of two ranks that come to harm: how they are started, and how they end.

``run`` starts what a user starts, which takes half a minute of imports: torchrun, and two processes that it has to
end. Where the fault is not the launcher's affair, ``harmed`` does the same in ranks of the pool.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from megasched.verify.ranks.pool import RankError, RankPool
from megasched.verify.recording import RankReport
from megasched.verify.trainer_run import RUN_FLAGS, train
from tests.waiting import until

ROOT = Path(__file__).parents[2]
SCHEDULE = Path(__file__).with_name("harmful_schedule.py")
TRACKER = "latest_checkpointed_iteration.txt"
TP2 = ["--tensor-model-parallel-size", "2"]
PP2 = ["--pipeline-model-parallel-size", "2"]
SAVING = ["--use-distributed-optimizer", "--ckpt-format", "torch_dist", "--dist-ckpt-optim-fully-reshardable"]
SAVING += ["--override-opt-param-scheduler"]
LINE = re.compile(r" iteration\s+(\d+)/\s*\d+ \|.* lm loss: (\S+) \|.* grad norm: (\S+) \|")
# By itself a rank waits for another for ten minutes. What ends it with that one: torchrun, or a lost connection.
ENDED_WITH_ANOTHER = re.compile(r"closing signal SIGTERM|Connection (closed|reset) by peer")
MARK = "FAULT_RUN"


@dataclass
class Ended:
    """A run that is over.

    Attributes:
        status: of the launcher, which is that of the rank that failed first.
        log: what all ranks have printed.
    """

    status: int
    log: str

    @property
    def grad_norms(self) -> dict[int, float]:
        """Of the iterations that it has made."""
        return grad_norms(self.log)


def run(folder: Path, model: str, flags: list[str], *, fault: str = "", rank: int = 0) -> Ended:
    """Starts two ranks and waits until none is left.

    Args:
        folder: for its files.
        fault: a function of ``harmful_schedule.py``.
        rank: which one it harms.
    """
    log = folder / "log"
    command = [sys.executable, "-m", "megasched.launch.torchrun.node", "--nproc-per-node=2", "--standalone"]
    command += ["--no-python", sys.executable, "-u", "-m", "megasched", "pretrain_gpt.py", "--rehearse"]
    command += [*RUN_FLAGS, "--model-schedule", str(SCHEDULE) if fault else "auto", "--hf-model", model, *flags]
    command += ["--data-cache-path", str(folder / "cache"), "--allow-unverified"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    env |= {"CUDA_VISIBLE_DEVICES": "", MARK: str(folder)}
    env |= {"FAULT": fault, "FAULT_RANK": str(rank) if fault else ""}
    with log.open("w") as output:
        process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=output, stderr=subprocess.STDOUT)
        try:
            process.wait()
            until(lambda: not _marked(folder))
        finally:
            for one in _marked(folder):
                one.kill()
            process.wait()
    return Ended(process.returncode, log.read_text(errors="replace"))


def harmed(ranks: RankPool, model: str, flags: list[str], iterations: int, *, fault: str, rank: int) -> str:
    """What is said of two ranks of the pool, one of which a function of ``harmful_schedule.py`` harms."""
    try:
        with pytest.raises(RankError) as caught:
            ranks.run(2, _train_harmed, model, flags, iterations, fault, rank)
    finally:
        ranks.renew()
    return str(caught.value)


def _train_harmed(model: str, flags: list[str], iterations: int, fault: str, rank: int) -> RankReport:
    os.environ.update(FAULT=fault, FAULT_RANK=str(rank))
    return train(model, flags, iterations=iterations, schedule=str(SCHEDULE), as_it_is=True)


def grad_norms(log: str) -> dict[int, float]:
    """Of the iterations that a log tells of."""
    return {int(iteration): float(norm) for iteration, _, norm in LINE.findall(log)}


def _marked(folder: Path) -> list[psutil.Process]:
    """The processes of a run that live."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == str(folder) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue  # it has ended, or belongs to others
    return found


def tracked(save: Path) -> str:
    """The last complete checkpoint, as Megatron's tracker has it."""
    return (save / TRACKER).read_text()
