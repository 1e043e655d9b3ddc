"""Writes Megatron's checkpoints aside and publishes them whole, by the claim of ``--save`` (save_claim.py)."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException

from megasched.errors import ConfigError, MegaschedError
from megasched.trainer.checkpoint.save_claim import SaveClaim, name_aside


class SaveError(SystemExit):
    """Ends the process where a checkpoint could not be written, with one message and status 1.

    It is no ``MegaschedError``: after status 2 launchers start no run again, and a disk may have room by then.
    """

    def __init__(self, public: Path, error: BaseException) -> None:
        why = str(error)
        if isinstance(error, CheckpointException):  # of torch; which ranks have failed is known to rank 0
            failures = {rank: raised for rank, (raised, _) in sorted(error.failures.items())}
            why = "; ".join(f"rank {rank}: {raised}" for rank, raised in failures.items()) or "rank 0 says why"
        super().__init__(f"SaveError: {public} can't be saved: {why}. What was complete before is untouched")


def on_rank_0[Result](work: Callable[[], Result]) -> Result:
    """Does some work on rank 0, and returns its result, or raises its error, on every rank."""
    found: list[Any] = [None]
    if torch.distributed.get_rank() == 0:
        try:
            found = [work()]
        except MegaschedError as error:
            found = [error]
        except OSError as error:
            found = [OSError(error.errno, error.strerror or str(error), error.filename)]
    torch.distributed.broadcast_object_list(found, src=0)
    if isinstance(found[0], Exception):
        raise found[0]
    return found[0]  # type: ignore[no-any-return]


class OneWriter:
    """Manages this run's access to its ``--save`` folder, on every rank; made on all ranks together.

    Args:
        save: the folder.

    Attributes:
        written: how often a checkpoint of a name was begun to be written.

    Raises:
        MegaschedError: on every rank, if rank 0 does not get the folder.
    """

    def __init__(self, save: str) -> None:
        self.claim: SaveClaim | None = None

        def claimed() -> Path:
            try:
                self.claim = SaveClaim(Path(save))
            except OSError as error:
                raise ConfigError(f"--save {save}: it can't be written to: {error}") from None
            return self.claim.aside

        self.save, self.aside = Path(save).absolute(), on_rank_0(claimed)
        self.written = Counter[str]()

    def covers(self, path: str | Path) -> bool:
        """Returns whether ``path`` lies in the folder."""
        return Path(path).absolute().is_relative_to(self.save)

    def begin(self, iteration: int) -> None:
        """Makes the folders of a checkpoint that is to be written, on all ranks together.

        Raises:
            SaveError: on every rank, if rank 0 can't write there: nobody waits for one that has failed.
            MegaschedError: on every rank, if another run has taken the folder over.
        """
        public = self.save / f"iter_{iteration:07d}"

        def make() -> None:
            if self.claim is not None:
                self.claim.written_aside(public, self.written[public.name])
                public.mkdir(parents=True, exist_ok=True)  # as Megatron does, on rank 0 alone

        with self._told(public):
            on_rank_0(make)

    def write(self, save: Callable[[str], Any], public: Path, add: Callable[[Path], None]) -> Any:
        """Has ``save`` write a checkpoint, publishes it, and returns what ``save`` returns.

        Args:
            save: writes to the folder that it is given, on all ranks; Megatron's ``dist_checkpointing.save``. A
                request of an asynchronous save that it returns publishes the checkpoint in the end.
            public: where the checkpoint is to appear.
            add: puts the checkpoint's other files into the folder that it is given, on rank 0.
        """
        # Of one iteration there may be several saves, the first of them still under way.
        times = self.written[public.name]
        self.written[public.name] += 1
        aside = name_aside(self.aside, public, times)

        def publish() -> None:
            if self.claim is not None:
                add(aside)
                self.claim.publish(aside, public)

        with self._told(public):
            if self.claim is not None:
                self.claim.written_aside(public, times)
            torch.distributed.barrier()
            request = save(str(aside))
            if request is None:
                torch.distributed.barrier()
                on_rank_0(publish)
            else:
                steps = [*request.finalize_fns, partial(on_rank_0, publish)]
                request.finalize_fns[:] = [partial(self._do_told, public, step) for step in steps]
        return request

    def _do_told(self, public: Path, step: Callable[[], None]) -> None:
        with self._told(public):
            step()

    @contextmanager
    def _told(self, public: Path) -> Iterator[None]:
        """Runs its body and turns errors of writing a checkpoint into a SaveError."""
        try:
            yield
        except MegaschedError:
            raise
        except (Exception, CheckpointException) as error:  # the latter is a BaseException
            if self.claim is not None:  # what was written aside is removed by a run that takes over
                self.claim.refuse_if_taken_over()
            raise SaveError(public, error) from error

    def release(self) -> None:
        """Frees the folder for other runs."""
        if self.claim is not None:
            self.claim.release()


class Storage:
    """Stands in for Megatron's ``maybe_msc``; the tracker file appears whole, and only while the folder is ours.

    Args:
        original: handles all other calls.
        tracker_name: name of the file that says which checkpoint is the last.
        writer: returns the writer in force, or None.
    """

    def __init__(self, original: Any, tracker_name: str, writer: Callable[[], OneWriter | None]) -> None:
        self._original, self._tracker_name, self._writer = original, tracker_name, writer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def open(self, path: str, mode: str = "r", *given: Any, **named: Any) -> Any:
        """Opens a file as the built-in ``open`` does; a tracker to write is published when it is closed."""
        writer = self._writer()
        tracker = mode == "w" and Path(path).name == self._tracker_name
        if tracker and writer is not None and writer.claim is not None and writer.covers(path):
            return _published(writer.claim, Path(path))
        return self._original.open(path, mode, *given, **named)


@contextmanager
def _published(claim: SaveClaim, public: Path) -> Iterator[io.StringIO]:
    text = io.StringIO()
    yield text
    try:
        claim.publish_text(text.getvalue(), public)
    except OSError as error:
        raise SaveError(public, error) from error
