"""Hosts that are this machine: an ``ssh`` that runs commands here as sshd would there, and their processes."""

from __future__ import annotations

import os
from pathlib import Path

# A session and an environment of its own; signals to the client do not reach the command, its stdin does. What it
# was called with is written down, words separated by \x1f.
SSH = """#!/usr/bin/env bash
{ printf '%s\\x1f' "$@"; printf '\\x1e'; } >>"${0%/*}/ssh.calls"
while [[ $1 == -o ]]; do shift 2; done
[[ $1 == -- ]] || exit 255
if [[ $2 == down* ]]; then echo "ssh: connect to host $2 port 22: No route to host" >&2; exit 255; fi
shift 2
setsid --wait env -i HOME="$HOME" PATH="$PATH" sh -c "$*"
"""


def add_ssh(folder: Path) -> dict[str, str]:
    """Puts it into a folder; returns the environment in which it is found."""
    folder.mkdir(exist_ok=True)
    ssh = folder / "ssh"
    ssh.write_text(SSH)
    ssh.chmod(0o755)
    return {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}


def ssh_calls(folder: Path) -> list[list[str]]:
    calls = (folder / "ssh.calls").read_text().split("\x1e")
    return [call.split("\x1f")[:-1] for call in calls if call]


def processes(run_id: str) -> dict[int, list[str]]:
    """Process id -> command line of what a job's script has started and is still there."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environment, words = (
                (folder / "environ").read_bytes(),
                (folder / "cmdline").read_text(errors="replace"),
            )
        except OSError:  # it has ended meanwhile, or is somebody else's
            continue
        if f"\0MEGASCHED_START={run_id}-".encode() in b"\0" + environment:
            found[int(folder.name)] = words.split("\0")[:-1]
    return found
