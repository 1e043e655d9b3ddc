"""Whether this machine can hold a Slurm of its own, and the packages for it, installed where they are missing.

Only on Debian and Ubuntu, by root, does anything get installed; elsewhere the reason is told. Nothing is started
by the packages and nothing is configured: what runs is what the lab starts, and it ends with the lab.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

# What the lab calls, and the package of Debian and Ubuntu that has it.
PACKAGES = {
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "sbatch": "slurm-client",
    "munged": "munge",
    "ip": "iproute2",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "setpriv": "util-linux",
    "hostname": "hostname",
}
# Daemons lie in sbin, which is not on everyone's PATH.
PATH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/local/sbin", "/usr/sbin", "/sbin"])
POLICY = Path("/usr/sbin/policy-rc.d")
APT_SECONDS = 600
NAMESPACES = ("unshare", "--net", "--mount", "--pid", "--uts", "--fork", "--mount-proc")
LINKS = "link add bridge0 type bridge\nlink add port0 type veth peer name eth0\nlink set port0 master bridge0\n"


class UnavailableError(Exception):
    """There can be no Slurm here. The text says what is missing, and how to get it."""


def provide() -> None:
    """Sees to it that a lab can be started.

    Raises:
        UnavailableError: it can't.
    """
    if os.geteuid() != 0:
        raise UnavailableError(_needs("root, for namespaces and for Slurm's daemons: run the tests as root"))
    provide_programs()
    try_namespaces()


def provide_programs() -> None:
    """Installs what is missing, once, however many pytest processes ask for it.

    Raises:
        UnavailableError: it can't be had.
    """
    if missing():
        # The lock is on a folder: it leaves no file behind.
        with _locked(POLICY.parent):
            install(missing())


def missing() -> list[str]:
    """Packages that have a program which is not here."""
    return sorted({package for program, package in PACKAGES.items() if not shutil.which(program, path=PATH)})


def install(packages: Sequence[str]) -> None:
    """Installs packages without starting their daemons.

    Raises:
        UnavailableError: there is no apt-get, or it failed.
    """
    if not packages:
        return
    if not shutil.which("apt-get", path=PATH):
        raise UnavailableError(
            _needs(f"{', '.join(packages)} (Debian's names), and there is no apt-get to get them")
        )
    with no_daemons(POLICY):
        _apt_get("update")
        _apt_get("install", "--yes", "--no-install-recommends", *packages)
    if left := missing():
        raise UnavailableError(_needs(f"{', '.join(left)}: installed by apt-get, and still not on {PATH}"))


def try_namespaces() -> None:
    """Does for a moment what the lab does first of all.

    Raises:
        UnavailableError: it is refused, as in most containers.
    """
    run = subprocess.run(
        [*NAMESPACES, "ip", "-batch", "-"],
        env={**os.environ, "PATH": PATH},
        input=LINKS,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if run.returncode != 0:
        raise UnavailableError(
            _needs(
                "namespaces and network links of its own, which were refused "
                f"({run.stderr.strip()[-300:]}): in a container, run that with --privileged"
            )
        )


@contextmanager
def no_daemons(policy: Path) -> Iterator[None]:
    """Debian's packages start what they bring, unless this file forbids it. One that is here is left as it is."""
    try:
        file = policy.open("x")
    except FileExistsError:
        yield
        return
    with file:
        file.write("#!/bin/sh\nexit 101\n")
    policy.chmod(0o755)
    try:
        yield
    finally:
        policy.unlink()


def _apt_get(*arguments: str) -> None:
    command = ["apt-get", "-q", "-o", "DPkg::Lock::Timeout=300", "-o", "Acquire::Retries=2", *arguments]
    quiet = {"DEBIAN_FRONTEND": "noninteractive", "NEEDRESTART_SUSPEND": "1"}
    try:
        run = subprocess.run(
            command,
            env={**os.environ, "PATH": PATH, **quiet},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=APT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise UnavailableError(_needs(f"packages, and apt-get {arguments[0]} took over {APT_SECONDS} s")) from None
    if run.returncode != 0:
        said = run.stderr.strip()[-600:]
        raise UnavailableError(
            _needs(f"packages that could not be installed: apt-get {' '.join(arguments)}: {said}")
        )


def _needs(what: str) -> str:
    return f"the tests on a real Slurm need {what}"


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
