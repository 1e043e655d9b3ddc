"""Renders the script of a job without Slurm: readable, kept, and the same for each host."""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megasched.errors import ConfigError
from megasched.launch.jobs.job_script import Job, render_template, value_of

TEMPLATE = "torchrun/job.sh.jinja"
# A name that ssh can't take for an option, and no shell for anything else.
HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*", re.ASCII)
HEAD = """`megasched launch torchrun` calls it on {where} as `bash job.sh NODE_RANK RESTART`, keeps what it
prints in logs/torchrun-RESTART/node-NODE_RANK.log, and calls it again after a failure.
Look at it with `megasched status {run_folder}`."""


@dataclass(frozen=True, kw_only=True)
class TorchrunJob(Job):
    """Describes a job to start.

    Attributes:
        hosts: names as ssh knows them, the first for rank 0; if there are none, this machine, without ssh.
    """

    hosts: Sequence[str] = ()

    @property
    def nodes(self) -> int:
        return len(self.hosts) or 1

    @property
    def world_size(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def run_id(self) -> str:
        """Returns eight hexadecimal digits for the run, which mark its processes."""
        return f"{zlib.crc32(os.fsencode(self.run_folder)):08x}"

    @property
    def save(self) -> Path | None:
        """Returns the ``--save`` folder; None without one."""
        save = value_of("--save", self.flags)
        return self.directory / save if save else None


def hosts_of(text: str) -> tuple[str, ...]:
    """Returns the hosts of ``node1,node2``.

    Raises:
        ConfigError: a word is no host's name, or a host comes twice.
    """
    hosts = tuple(text.split(",")) if text else ()
    for host in hosts:
        if not HOST.fullmatch(host):
            raise ConfigError(
                f"--hosts {text}: `{host}` is no host; give names as in ~/.ssh/config or DNS, e.g. node1,node2 "
                "(users and ports belong into ~/.ssh/config)"
            )
        if hosts.count(host) > 1:
            raise ConfigError(f"--hosts {text}: {host} comes twice; --gpus-per-node says how many ranks it has")
    return hosts


def render(job: TorchrunJob) -> str:
    """Renders the script, to be called with the host's number and the number of the start."""
    where = "each host" if job.hosts else "this machine"
    on = f"{len(job.hosts)} hosts, torchrun over ssh" if job.hosts else "this machine, torchrun"
    return render_template(
        TEMPLATE,
        script=job.script,
        flags=job.flags,
        title=f"{job.world_size} GPUs on {on}: {job.script}",
        head=HEAD.format(where=where, run_folder=job.run_folder),
        environment=job.environment,
        run_folder=job.run_folder,
        run_id=job.run_id,
        directory=job.directory,
        python=job.python,
        interface=job.interface,
        threads=1,
        hosts=job.hosts,
        master=job.hosts[0] if job.hosts else "127.0.0.1",
        nodes=job.nodes,
        gpus=job.gpus_per_node,
    )
