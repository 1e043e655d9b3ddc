"""A real run's logs, and how a test looks at a run.

``requeued_run`` holds what a rehearsal of four ranks on two nodes of Slurm's has printed, less most lines that
nobody reads. The job was requeued after iteration 28 and went on from the checkpoint of iteration 20.
"""

from datetime import datetime, timedelta
from pathlib import Path

from megasched.launch.slurm.client import SlurmJob
from megasched.launch.status import run_status
from megasched.launch.status.run_status import RunReader
from megasched.launch.status.training_log import TrainingLog

REAL = Path(__file__).with_name("requeued_run")
FIRST, SECOND = (
    [path.read_text().splitlines() for path in sorted((REAL / "logs" / name).glob("*.log"))]
    for name in ("1-0", "1-1")
)
LAST_LINE = datetime(2026, 11, 22, 15, 11, 19, 409668)


def slurm_says(monkeypatch, **fields):
    job = SlurmJob(**{"job_id": "1", "name": "llama", "state": "RUNNING", **fields})
    monkeypatch.setattr(run_status, "ask_slurm", lambda job_id: job)
    return job


def look(run, now=LAST_LINE + timedelta(seconds=10)):
    return RunReader(str(run.folder.path)).look(now)


def until(lines, iteration):
    """The lines up to that of an iteration."""
    return lines[: next(i for i, line in enumerate(lines) if f"iteration {iteration:8d}/" in line) + 1]


def read_log(lines):
    """The numbers of a whole log."""
    log = TrainingLog()
    for line in lines:
        log.read(line)
    return log
