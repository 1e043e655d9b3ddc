"""``megasched launch``: what is said before a run starts, and its start."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from megasched.json_output import print_json

if TYPE_CHECKING:
    from megasched.launch.checks import Checked
    from megasched.launch.slurm.script import SlurmJob

GIB = 1 << 30


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
    found: dict[str, Any] = {"facts": {}, "warnings": []}
    if prepared.checked is not None:
        found = {"facts": prepared.checked.facts, "warnings": list(prepared.checked.warnings)}
        _tell(job.script, job.world_size, prepared.checked)
    if dry_run:
        if as_json:
            print_json({**found, "script": prepared.text})
        else:
            print(prepared.text, end="")
        return
    script = write(prepared)
    jobs = enqueue(RunFolder(job.run_folder), times)
    if as_json:
        print_json({**found, "run_folder": str(job.run_folder), "script": str(script), "jobs": jobs})
        return
    print(f"script: {script}")
    print(f"submitted: {', '.join(jobs)}; `megasched status {jobs[0]} --watch` follows it")


def _tell(script: str, world_size: int, checked: Checked) -> None:
    """What the check has found, on stderr: stdout is for the script, or JSON."""
    from rich.filesize import decimal

    facts = checked.facts
    lines = [
        f"megasched: {script} on {world_size} GPUs: {facts['layout']}, {facts['microbatches']} micro-batches, "
        f"{facts['parameters'] / 1e9:.2f} B parameters"
    ]
    if "memory" in facts:
        lines.append(f"  memory of the fullest rank: {max(facts['memory']) / GIB:.1f} GiB")
    if facts["save"]:
        lines.append(f"  a checkpoint: {decimal(facts['checkpoint_bytes'])} in {facts['save']}")
    lines += [f"  mind: {warning}" for warning in checked.warnings]
    print("\n".join(lines), file=sys.stderr)
