"""Rehearses a job on this machine: the same command, its ranks on the CPU, and a log as every run has."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from megasched.launch.jobs.job_script import value_of
from megasched.launch.run_folder import RunFolder
from megasched.launch.status.failure_log import ENDED_BY
from megasched.launch.torchrun.start import free_port
from megasched.launch.watched_run import INTERRUPTED, run_watched
from megasched.planner.hardware.hardware import GIB
from megasched.printing.shell_command import shell_command
from megasched.reading.tracker import last_saved

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

    @property
    def save(self) -> str | None:
        return value_of("--save", self.given) or None


def run(job: LocalJob, *, say: Callable[[str], None], on_line: Callable[[str], None]) -> tuple[int, Path]:
    """Runs a job to its end; Ctrl-C, SIGTERM and SIGKILL end it, and its ranks.

    Args:
        say: called with each message of the launcher itself: the log at the start, what ended it.
        on_line: called with each line of the ranks.

    Returns:
        The exit status, which is that of the rank that failed first, or 130 after Ctrl-C or SIGTERM; and the log.
    """
    folder = RunFolder(job.run_folder)
    log = folder.node_log(NAME, folder.begin_attempt(NAME), 0)
    say(f"log: {log}; `{shell_command('status', str(job.run_folder), '--watch')}` follows it")
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
        saved = last_saved(job.save, say)
        checkpoint = f"iteration {saved} in {job.save}" if saved else "none"
        say(f"{ENDED_BY}Ctrl-C or SIGTERM, and with it the ranks; last checkpoint: {checkpoint}; log: {log}")
    return (status if status >= 0 else 128 - status), log


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
