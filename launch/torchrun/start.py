"""Starts a job's ranks on every host, and starts them again after failures."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path
from threading import Event, Thread

from megasched.launch.jobs.checks import Checks, Prepared, look_over
from megasched.launch.jobs.job_script import write_script
from megasched.launch.jobs.words import refuse_unusable
from megasched.launch.run_folder import RunFolder
from megasched.launch.status.failure_log import ENDED_BY
from megasched.launch.torchrun.nodes import CERTAIN, Nodes
from megasched.launch.torchrun.script import TorchrunJob, render
from megasched.launch.watched_run import INTERRUPTED, last_error, sigterm_as_interrupt, tail
from megasched.reading.tracker import last_saved

NAME = "torchrun"
# A host that has gone is noticed after three of ServerAliveInterval.
SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=30", "-o", "ServerAliveInterval=30")
SECONDS_TO_ASK = 60
# So long times the starts that have brought nothing: a host may be coming up again.
SECONDS_IN_VAIN = 30
# Ranks that are still starting do not hear that they are to save.
SECONDS_TO_SAY_AGAIN = 20
# Of the log of the host that failed first.
TAIL_LINES = 20


def prepare(job: TorchrunJob, checks: Checks, *, ask_hosts: bool = True) -> Prepared[TorchrunJob]:
    """Renders the script and checks everything; writes nothing.

    Args:
        ask_hosts: whether to ask each host if it can be reached and has what the script names.

    Raises:
        ConfigError: the job has problems; the message lists all of them.
    """
    refuse_unusable(job)
    ask = partial(_refused, job) if ask_hosts and job.hosts else None
    return look_over(job, render(job), checks, ask=ask, intent="started")


def _refused(job: TorchrunJob) -> list[str]:
    """Returns a reason for each host that can't run the script."""
    with ThreadPoolExecutor(len(job.hosts)) as pool:
        return [*filter(None, pool.map(partial(_refused_by_host, job), job.hosts))]


def _refused_by_host(job: TorchrunJob, host: str) -> str:
    """Returns why a host can't run the script; empty if it can."""
    command = over_ssh(host, ["ls", "-d", str(job.directory), job.python])
    try:
        found = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=SECONDS_TO_ASK
        )
    except OSError as error:
        return f"ssh can't be started: {error.strerror}"
    except subprocess.TimeoutExpired:
        return f"host {host}: no answer within {SECONDS_TO_ASK} s"
    said = "; ".join(line for line in found.stderr.splitlines() if line)
    return f"host {host}: {said or f'status {found.returncode}'}" if found.returncode else ""


def over_ssh(host: str, words: Sequence[str]) -> list[str]:
    """Returns a command that runs on another host; ssh hands one string to the shell there."""
    return [*SSH, "--", host, shlex.join(words)]


def write(prepared: Prepared[TorchrunJob]) -> Path:
    """Writes the script into the run's folder, and returns its path."""
    folder = RunFolder(prepared.job.run_folder)
    write_script(folder.host_script, prepared.text, prepared.job, prepared.facts)
    return folder.host_script


@dataclass
class Supervisor:
    """Starts a job whose script is written, and starts it again after failures.

    Attributes:
        say: called with each message of the launcher itself.
        on_line: called with each line of the ranks, in a separate thread.
        starts: the numbers of the starts so far.
    """

    job: TorchrunJob
    say: Callable[[str], None]
    on_line: Callable[[str], None]
    starts: list[int] = field(default_factory=list)
    _asked_to_save: bool = False
    _ended: Event = field(default_factory=Event)
    _nodes: Nodes | None = None

    def run(self) -> int:
        """Runs the job to its end, and returns its status.

        Ctrl-C and SIGTERM end the ranks; at SIGUSR1 they save and end. None of them is followed by a restart.
        """
        # In a thread: a handler that prints may have interrupted a print.
        previous = signal.signal(signal.SIGUSR1, lambda *_: Thread(target=self._save_and_end, daemon=True).start())
        try:
            with sigterm_as_interrupt():
                status = self._run()
            if status and self._nodes.failed:
                log = self._folder.node_log(NAME, self.starts[-1], self._nodes.failed[0])
                for error in last_error(log):
                    self.say(error)
            return status
        except KeyboardInterrupt:
            self._say("ended by Ctrl-C or SIGTERM, and with it the ranks")
            if self.starts:
                with self._folder.node_log(NAME, self.starts[-1], 0).open("a") as log:
                    log.write(f"{ENDED_BY}Ctrl-C or SIGTERM\n")
            return INTERRUPTED
        finally:
            self._ended.set()
            signal.signal(signal.SIGUSR1, previous)

    def _run(self) -> int:
        in_vain = 0
        saved = self._last_saved()
        while True:
            status = self._start(saved)
            if status == 0 or self._asked_to_save:
                self._say(f"ended with status {status}")
                return status
            why = f"it ended with status {status}"
            if status in CERTAIN:
                self._say(f"{why}: the command or the numbers are wrong, and a restart mends neither")
                return status
            before, saved = saved, self._last_saved()
            in_vain = in_vain + 1 if saved == before else 0
            if in_vain > self.job.max_restarts:
                self._say(f"{why}; {self.job.max_restarts} restarts have brought no checkpoint after {_of(saved)}")
                return status
            pause = SECONDS_IN_VAIN * in_vain
            self._say(f"{why}: it is started again" + (f" in {pause} s" if pause else ""))
            time.sleep(pause)
            if self._asked_to_save:
                return status

    def _start(self, saved: str) -> int:
        folder, job = self._folder, self.job
        restart = folder.begin_attempt(NAME)
        self.starts.append(restart)
        place = ", ".join(job.hosts) or "this machine"
        self._say(f"on {place}, last checkpoint: {_of(saved)}; logs: {folder.attempt_folder(NAME, restart)}")
        env = {**os.environ} if job.hosts else {**os.environ, "MASTER_PORT": str(free_port())}
        commands = [
            (self._command(node, restart), folder.node_log(NAME, restart, node)) for node in range(job.nodes)
        ]
        with Nodes(commands, env=env, on_line=self.on_line) as self._nodes:
            self._nodes.wait()
            if self._nodes.failed and job.hosts:
                node, status = self._nodes.failed
                self._say(f"{job.hosts[node]} ended with status {status}: the others are ended")
        if self._nodes.failed and job.hosts:
            self.say(tail(folder.node_log(NAME, restart, self._nodes.failed[0]), TAIL_LINES))
        return self._nodes.status

    def _command(self, node: int, restart: int) -> list[str]:
        words = ["bash", str(self._folder.host_script), str(node), str(restart)]
        return over_ssh(self.job.hosts[node], words) if self.job.hosts else words

    def _save_and_end(self) -> None:
        self._asked_to_save = True
        self._say("SIGUSR1: the ranks save and end" + ("" if self.job.save else ", if there were a --save"))
        while not self._ended.is_set():
            if self._nodes is not None:
                self._nodes.ask_to_save()
            self._ended.wait(SECONDS_TO_SAY_AGAIN)

    def _last_saved(self) -> str:
        return last_saved(self.job.save, self._say)

    def _say(self, text: str) -> None:
        start = f", restart {self.starts[-1]}" if self.starts else ""
        line = f"{datetime.now():%Y-%m-%d %H:%M:%S} megasched: {NAME}{start}: {text}"
        self.say(line)
        with self._folder.batch_log(NAME).open("a") as log:
            log.write(f"{line}\n")

    @property
    def _folder(self) -> RunFolder:
        return RunFolder(self.job.run_folder)


def _of(saved: str) -> str:
    return f"iteration {saved}" if saved else "none"


def free_port() -> int:
    """Returns a TCP port on which nothing listens on this machine."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]
