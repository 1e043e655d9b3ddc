"""``megasched launch``: what is said before a run starts, and its start."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megasched.cli.amounts import format_bytes, format_count
from megasched.errors import ConfigError
from megasched.json_output import print_json

if TYPE_CHECKING:
    from megasched.launch.jobs.checks import Checked
    from megasched.launch.local import LocalJob
    from megasched.launch.slurm.script import SlurmJob
    from megasched.launch.torchrun.script import TorchrunJob


def launch_slurm(
    job: SlurmJob, *, gpu: str | None, check_run: bool, dry_run: bool, times: int, as_json: bool
) -> None:
    """Checks a job, writes its script and submits it; what was found is printed.

    Args:
        gpu, check_run: as ``prepare`` takes them.
        dry_run: print the script alone.
        times: as ``enqueue`` takes it.

    Raises:
        ConfigError: whatever is wrong; nothing is written or submitted then.
    """
    from megasched.launch.run_folder import RunFolder
    from megasched.launch.slurm.start import enqueue, prepare, write

    prepared = prepare(job, gpu=gpu, check_run=check_run, ask_slurm=not dry_run)
    found = _found(job.script, f"{job.world_size} GPUs", prepared.checked)
    if dry_run:
        _print_script(prepared.text, found, as_json)
        return
    script = write(prepared)
    jobs = enqueue(RunFolder(job.run_folder), times)
    if as_json:
        print_json({**found, "run_folder": str(job.run_folder), "script": str(script), "jobs": jobs})
        return
    print(f"script: {script}")
    print(f"submitted: {', '.join(jobs)}; `megasched status {jobs[0]} --watch` follows it")


def launch_torchrun(job: TorchrunJob, *, gpu: str | None, check_run: bool, dry_run: bool, as_json: bool) -> int:
    """Checks a job, writes its script, and runs it to its end, restarts included; what was found is printed.

    Args:
        gpu, check_run: as ``prepare`` takes them.
        dry_run: print the script alone.

    Returns:
        The status.

    Raises:
        ConfigError: whatever is wrong; nothing is written or started then.
    """
    from megasched.launch.torchrun.start import Supervisor, prepare, write

    prepared = prepare(job, gpu=gpu, check_run=check_run, ask_hosts=not dry_run)
    found = _found(job.script, f"{job.world_size} GPUs", prepared.checked)
    if dry_run:
        _print_script(prepared.text, found, as_json)
        return 0
    script = write(prepared)
    _say(f"script: {script}; `megasched status {job.run_folder} --watch` follows it")
    supervisor = Supervisor(job, say=_say, on_line=_shown(job, as_json))
    status = supervisor.run()
    if as_json:
        end = {"run_folder": str(job.run_folder), "script": str(script), "starts": supervisor.starts}
        print_json({**found, **end, "status": status})
    return status


def launch_local(job: LocalJob, *, check_run: bool, as_json: bool) -> int:
    """Checks a job and rehearses it here; returns the status.

    Raises:
        ConfigError: whatever is wrong; nothing is started then.
    """
    from megasched.launch.jobs.checks import check, told
    from megasched.launch.jobs.words import refuse_unusable
    from megasched.launch.local import narrow, run

    refuse_unusable(job)
    checked = check(job.script, job.flags, job.ranks) if check_run else None
    if checked is not None and checked.problems:
        raise ConfigError(told(checked.problems))
    found = _found(job.script, f"{job.ranks} ranks of this machine", checked)
    too_little = narrow(job.ranks, found["facts"])
    for warning in too_little:
        _say(f"  mind: {warning}")
    logs: list[Path] = []

    def on_start(log: Path) -> None:
        logs.append(log)
        _say(f"log: {log}; `megasched status {job.run_folder} --watch` follows it")

    output = sys.stderr if as_json else sys.stdout
    status = run(job, on_start=on_start, on_line=partial(print, file=output, flush=True))
    if as_json:
        found["warnings"] += too_little
        print_json({**found, "run_folder": str(job.run_folder), "log": str(logs[0]), "status": status})
    return status


def _print_script(text: str, found: dict[str, Any], as_json: bool) -> None:
    """A dry run: the script alone, or with what the check has found."""
    if as_json:
        print_json({**found, "script": text})
    else:
        print(text, end="")


def _say(text: str) -> None:
    """On stderr: stdout is for what was asked for."""
    print(text, file=sys.stderr, flush=True)


def _shown(job: TorchrunJob, as_json: bool) -> Callable[[bytes], None]:
    """What becomes of the ranks' lines, beside their logs: those of one machine are shown, as torchrun does."""
    output = sys.stderr.buffer if as_json else sys.stdout.buffer

    def show(line: bytes) -> None:
        output.write(line)
        output.flush()

    return (lambda line: None) if job.hosts else show


def _found(script: str, place: str, checked: Checked | None) -> dict[str, Any]:
    """What the check has found, for JSON; it is told as well."""
    if checked is None:
        return {"facts": {}, "warnings": []}
    _tell(script, place, checked)
    return {"facts": checked.facts, "warnings": list(checked.warnings)}


def _tell(script: str, place: str, checked: Checked) -> None:
    """What the check has found."""
    from rich.filesize import decimal

    facts = checked.facts
    lines = [
        f"megasched: {script} on {place}: {facts['layout']}, {facts['microbatches']} micro-batches, "
        f"{format_count(facts['parameters'])} parameters"
    ]
    if "memory" in facts:
        lines.append(f"  memory of the fullest rank: {format_bytes(max(facts['memory']))}")
    if facts["save"]:
        lines.append(f"  a checkpoint: {decimal(facts['checkpoint_bytes'])} in {facts['save']}")
    lines += [f"  mind: {warning}" for warning in checked.warnings]
    _say("\n".join(lines))
