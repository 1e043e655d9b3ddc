"""Lets one run alone write to a ``--save`` folder: a later run takes it over, and the earlier can't write then.

On a cluster an old run may live on, half dead, while its successor trains: its node has lost the network, or its
job was requeued before its last process was gone. No lock helps, since nobody can tell a dead holder from one that
sleeps. So a checkpoint is written aside and comes into the folder by two renames, the first of them *into* a
folder that is the run's own. Taking over is to rename that folder away: from then on the old run's rename fails,
atomically, whatever it had looked up before. What it writes aside harms nobody.

    SAVE/.megasched/claim-<run>/      the run's own; made once, removed by the run that takes over
    SAVE/.megasched/aside-<run>/      where it writes checkpoints that are not complete
    SAVE/iter_0000010/                complete, always

Every folder here must be on one file system on which ``rename`` is atomic (POSIX; Lustre, GPFS, NFS, local disks).
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
import time
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path

from megasched.errors import CheckpointError, ConfigError
from megasched.files import write_whole
from megasched.reading.files import MIB, Expected
from megasched.reading.json_file import read_json
from megasched.reading.tracker import RELEASE, read_tracker
from megasched.slurm import has_processes

FOLDER = ".megasched"
CLAIM, ASIDE, GONE = "claim-", "aside-", "gone-"
OWNER = "owner.json"
REPLACED = "replaced-"
OWNER_FILE = Expected("which run has claimed the folder, in JSON", most=MIB)
OWNER_FORM = {"job": str, "restart": int, "host": str, "pid": int, "since": float}
REPLACED_NAME = Expected("the name of a checkpoint that was being replaced, in JSON", most=MIB)


@dataclass(frozen=True)
class Owner:
    """Identifies a run.

    Attributes:
        job: Slurm's job id; empty outside of Slurm.
        restart: how often Slurm has requeued this job.
        host, pid: host and process id of rank 0.
        since: when that process was started, in seconds since the epoch.
    """

    job: str
    restart: int
    host: str
    pid: int
    since: float

    @staticmethod
    def this_process() -> Owner:
        import psutil

        return Owner(
            os.environ.get("SLURM_JOB_ID", ""),
            int(os.environ.get("SLURM_RESTART_COUNT") or 0),
            socket.gethostname(),
            os.getpid(),
            psutil.Process().create_time(),
        )

    def __str__(self) -> str:
        job = f"Slurm job {self.job}, restart {self.restart}, " if self.job else ""
        return f"{job}process {self.pid} on {self.host}"

    def later_incarnation_of(self, other: Owner) -> bool:
        """Returns whether Slurm has started this run after ``other``, as the same job."""
        return bool(self.job) and self.job == other.job and self.restart > other.restart

    def certainly_lives(self, asking: Owner) -> bool:
        """Returns whether the run is known to be running: by this machine, or by Slurm as another job.

        An earlier start of the same job has lost its folder even if its last process is not gone yet; of the same
        start there may be several runs, in one allocation.
        """
        if self.job and self.job != asking.job:
            return has_processes(self.job)
        if (self.restart, self.host) != (asking.restart, asking.host) or self.pid == asking.pid:
            return False
        import psutil

        try:
            return abs(psutil.Process(self.pid).create_time() - self.since) < 1
        except psutil.NoSuchProcess:
            return False


def name_aside(folder: Path, public: Path, times: int) -> Path:
    """Returns the folder within ``folder`` in which a checkpoint is written that was written so often before."""
    return folder / (f"again-{times}" if times else "") / public.name


class SaveClaim:
    """Holds a run's right to write to a ``--save`` folder, in one process of the run: rank 0.

    Args:
        save: the folder; made if it is missing.
        owner: the run; this process's by default.

    Raises:
        ConfigError: another job that is running writes there.
        CheckpointError: a later incarnation of this very job has the folder already.
    """

    def __init__(self, save: Path, owner: Owner | None = None) -> None:
        self.save, self.owner = save.absolute(), owner or Owner.this_process()
        self.inside = self.save / FOLDER
        self._warned: set[str] = set()
        # A name that nobody had before: what an earlier run still has open can't be ours.
        self.name = f"{self.owner.job or self.owner.host}-{self.owner.restart}-{uuid.uuid4().hex[:12]}"
        self.folder, self.aside = self.inside / f"{CLAIM}{self.name}", self.inside / f"{ASIDE}{self.name}"
        self.inside.mkdir(parents=True, exist_ok=True)
        for found in self._others():
            if found.certainly_lives(self.owner):
                raise ConfigError(
                    f"--save {save}: another run writes there and is alive: {found}. Two runs in one folder would "
                    "mix their checkpoints; give this one a folder of its own, or end the other first"
                )
        beside = self.inside / f".{self.name}"
        beside.mkdir()
        write_whole(beside / OWNER, [json.dumps(asdict(self.owner))])
        beside.rename(self.folder)  # with the owner in it from the first moment
        for found in self._others():
            if found.later_incarnation_of(self.owner):
                shutil.rmtree(self.folder)
                raise CheckpointError(f"--save {save}: a later start of this job has taken it over: {found}")
        self._take_over()

    # ---- taking over ------------------------------------------------------------------------------------

    def _others(self) -> list[Owner]:
        """Returns the owners of all claims but our own."""
        found = []
        for folder in self.inside.glob(f"{CLAIM}*"):
            if folder != self.folder:
                try:
                    found.append(Owner(**read_json(folder / OWNER, OWNER_FILE, OWNER_FORM)))
                except ConfigError as error:
                    if folder.exists():  # else given up meanwhile
                        self._warn(f"{error}. A loss of power leaves such a file; the claim is taken over")
        return found

    def _take_over(self) -> None:
        """Ends every other claim, and puts back a checkpoint that was being replaced meanwhile."""
        for folder in self.inside.glob(f"{CLAIM}*"):
            if folder != self.folder:
                try:
                    folder.rename(self.inside / f"{GONE}{folder.name.removeprefix(CLAIM)}")
                except FileNotFoundError:
                    continue
        for gone in self.inside.glob(f"{GONE}*"):
            for replaced in gone.glob(f"{REPLACED}*"):
                try:
                    name = read_json(gone / f"to-{replaced.name}", REPLACED_NAME, str)
                except ConfigError as error:
                    self._warn(f"{error}. The checkpoint that it names is not put back")
                    continue
                public = self.save / name
                if not public.exists() and public.resolve().is_relative_to(self.save.resolve()):
                    replaced.rename(public)
            shutil.rmtree(gone, ignore_errors=True)
            # The old run may write on there: what is left goes when the next one takes over.
            shutil.rmtree(self.inside / f"{ASIDE}{gone.name.removeprefix(GONE)}", ignore_errors=True)
        claims = {folder.name.removeprefix(CLAIM) for folder in self.inside.glob(f"{CLAIM}*")}
        for aside in self.inside.glob(f"{ASIDE}*"):
            if aside.name.removeprefix(ASIDE) not in claims:
                shutil.rmtree(aside, ignore_errors=True)

    def tell_of_what_is_ahead(self, iteration: int) -> None:
        """Warns of checkpoints that a run which begins after this iteration is going to replace."""
        try:
            last = read_tracker(self.save)
        except CheckpointError:
            return
        if last != RELEASE and int(last) > iteration:
            self._warn(
                f"--save {self.save} has a checkpoint of iteration {int(last)}, and this run begins after "
                f"iteration {iteration}: it will replace what is there; --load {self.save} goes on from the "
                "last one"
            )

    def _warn(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            print(f"megasched: warning: {text}", file=sys.stderr, flush=True)

    def release(self) -> None:
        """Frees the folder, unless another run has taken it over.

        Where nobody can write there any more, the next run takes over what is left.
        """
        shutil.rmtree(self.aside, ignore_errors=True)
        try:
            self.folder.rename(self.inside / f"{GONE}{self.name}")
        except OSError:
            return
        shutil.rmtree(self.inside / f"{GONE}{self.name}", ignore_errors=True)
        try:
            self.inside.rmdir()
        except OSError:  # of others there is something left
            return

    # ---- writing ----------------------------------------------------------------------------------------

    def written_aside(self, public: Path, times: int = 0) -> Path:
        """Makes an empty folder in which the checkpoint ``public`` is to be written, and returns it.

        Args:
            times: how often this run has written it before.
        """
        aside = name_aside(self.aside, public, times)
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        return aside

    def refuse_if_taken_over(self) -> None:
        """Checks that the claim still holds.

        Raises:
            CheckpointError: another run has taken the folder over.
        """
        if not self.folder.exists():
            raise self._taken_over()

    def publish(self, aside: Path, public: Path) -> None:
        """Makes a complete checkpoint appear in the folder, and replaces one that was there.

        Raises:
            CheckpointError: another run has taken the folder over; nothing of it has changed then.
        """
        mine = self.folder / public.name
        self._rename(aside, mine)
        try:
            public.rmdir()  # Megatron makes it, empty, before it saves
        except FileNotFoundError:
            public.parent.mkdir(parents=True, exist_ok=True)
        except OSError:
            old = self.folder / f"{REPLACED}{time.time_ns()}"
            self._write(self.folder / f"to-{old.name}", json.dumps(str(public.absolute().relative_to(self.save))))
            self._rename(public, old)
        self._rename(mine, public)
        for old in self.folder.glob(f"{REPLACED}*"):
            shutil.rmtree(old, ignore_errors=True)
            (self.folder / f"to-{old.name}").unlink(missing_ok=True)

    def publish_text(self, text: str, public: Path) -> None:
        """Replaces a small file, Megatron's tracker.

        Raises:
            CheckpointError: another run has taken the folder over.
        """
        mine = self.folder / public.name
        self._write(mine, text)
        self._rename(mine, public)

    def _write(self, path: Path, text: str) -> None:
        try:
            with path.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
        except FileNotFoundError:
            raise self._taken_over() from None

    def _rename(self, old: Path, new: Path) -> None:
        try:
            old.rename(new)
        except FileNotFoundError:
            self.refuse_if_taken_over()
            raise

    def _taken_over(self) -> CheckpointError:
        by = "; ".join(map(str, self._others())) or "a run that has ended"
        return CheckpointError(
            f"--save {self.save}: another run has taken this folder over: {by}. This run, {self.owner}, saves "
            "nothing there any more; the last checkpoint that it completed is untouched"
        )
