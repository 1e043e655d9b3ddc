"""Rehearses a job on this machine: the same command, its ranks on the CPU, and a log as every run has."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from megasched.launch.run_folder import RunFolder
from megasched.launch.status.failure_log import ENDED_BY
from megasched.launch.torchrun.start import free_port
from megasched.launch.watched_run import INTERRUPTED, run_watched
from megasched.planner.hardware.hardware import GIB

NAME = "local"
# Ranks share the cores, and gloo must not look for them by this machine's name. What the user has set stays.
DEFAULTS = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TOKENIZERS_PARALLELISM": "false"}


@dataclass(frozen=True)
class LocalJob:
    """Describes a job to rehearse.

    Attributes:
        run_folder: folder for the logs.
        ranks: number of ranks of the whole job.
        script: the training script, as ``megasched`` takes it.
        given: the flags that follow it, with or without ``--rehearse``.
    """

    run_folder: Path
    ranks: int
    script: str
    given: Sequence[str]

    @property
    def flags(self) -> list[str]:
        return [*self.given] if "--rehearse" in self.given else ["--rehearse", *self.given]


def run(job: LocalJob, *, on_start: Callable[[Path], None], on_line: Callable[[str], None]) -> int:
    """Runs a job to its end; Ctrl-C, SIGTERM and SIGKILL end it, and its ranks.

    Args:
        on_start: called with the path of the log.
        on_line: called with each line of the ranks.

    Returns:
        The exit status: that of the rank that failed first; 130 after Ctrl-C or SIGTERM.
    """
    folder = RunFolder(job.run_folder)
    log = folder.node_log(NAME, folder.begin_attempt(NAME), 0)
    on_start(log)
    command = [
        *(sys.executable, "-m", "megasched.launch.with_parent", str(os.getpid())),
        *(sys.executable, "-m", "megasched.launch.torchrun.node", f"--nproc-per-node={job.ranks}"),
        *("--master-addr=127.0.0.1", f"--master-port={free_port()}", "--no-python"),
        *(sys.executable, "-u", "-m", "megasched", job.script, *job.flags),
    ]
    # A rehearsal beside a GPU is one without it.
    env = {**DEFAULTS, **os.environ, "CUDA_VISIBLE_DEVICES": ""}
    status = run_watched(command, env=env, log_path=log, on_line=on_line)
    if status == INTERRUPTED:
        with log.open("a") as file:
            file.write(f"{ENDED_BY}Ctrl-C or SIGTERM\n")
    return status if status >= 0 else 128 - status


def narrow(ranks: int, facts: dict[str, Any]) -> list[str]:
    """Returns a warning each if this machine has too few cores or too little memory.

    Args:
        facts: facts from the check of the job; empty where there was none.
    """
    found = []
    cores = len(os.sched_getaffinity(0))
    if cores < ranks:
        found.append(f"{ranks} ranks share {cores} cores: they take turns, and may be slow")
    # Each weight and its optimizer state lie on one rank at least, whatever the layout.
    needed = facts.get("checkpoint_bytes", 0)
    free = psutil.virtual_memory().available + psutil.swap_memory().free
    if needed > free:
        found.append(
            f"weights and optimizer take {needed / GIB:.1f} GiB at least, and {free / GIB:.1f} GiB of memory are "
            "free: it will hardly come far; --hf-override num_hidden_layers=... makes the model smaller"
        )
    return found
