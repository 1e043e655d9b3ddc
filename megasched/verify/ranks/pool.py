"""Keeps rank processes alive as long as the pool: a case sends a function, each rank runs it.

::

    def _sum(value):
        tensor = torch.tensor([value + torch.distributed.get_rank()])
        torch.distributed.all_reduce(tensor)
        return tensor

    with RankPool() as ranks:
        assert ranks.run(2, _sum, 1) == [torch.tensor([3]), torch.tensor([3])]

The function must be importable: at module level, no lambda. Ranks have CUDA emulated
(``patches.host_cuda``) and Megatron imported; a case finds a fresh gloo world of the size it asked for
and none of Megatron's global state. The output of ranks is shown only when a case fails.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.reduction import send_handle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megasched.reading.log_lines import read_log
from megasched.verify.plain.runs import PlainProcess

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection

WORKER = "megasched.verify.ranks.worker"
MAX_RANKS = 4
START_SECONDS = 300
# After the first failure, the time that the other ranks get to end by themselves.
GRACE_SECONDS = 3
# The most that a rank gets to write its stacks, which takes milliseconds where the machine is idle.
STACK_SECONDS = 30
OUTPUT_CHARS = 4000
# Environment variable of the ranks: the pool's folder.
FOLDER = "MEGASCHED_RANKS_FOLDER"
CACHE = "cache"


class RankError(AssertionError):
    """Reports that a case failed on some rank, or hung, with the report of every rank concerned."""


class Template:
    """Starts the process that imports torch and Megatron once; ranks are forked from it (never from its owner)."""

    def __init__(self, folder: Path, cwd: Path | None) -> None:
        self.log = folder / "template.log"
        self.control, theirs = Pipe()
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", WORKER, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[theirs.fileno()],
                cwd=cwd,
                # The working directory must not come first on sys.path: a folder `megatron` there is not Megatron.
                env={
                    **os.environ,
                    "PYTHONSAFEPATH": "1",
                    "PYTHONPATH": os.pathsep.join(search_path()),
                    FOLDER: str(folder),
                    "OMP_NUM_THREADS": "1",
                    "OPENBLAS_NUM_THREADS": "1",
                    "CUDA_VISIBLE_DEVICES": "",
                },
            )
        theirs.close()
        if not self.control.poll(START_SECONDS) or _receive(self.control) != "ready":
            self.process.kill()
            raise RankError(f"the ranks' template did not start:\n{read_log(self.log)[-OUTPUT_CHARS:]}")

    def fork(self, descriptor: int, *details: object) -> int:
        """Forks a new rank that talks over ``descriptor``, and returns its process id."""
        self.control.send(("fork", *details))
        send_handle(self.control, descriptor, self.process.pid)
        return self.control.recv()

    def reap(self, pid: int) -> int:
        """Waits for a rank's end and returns its exit code (negative: the signal that ended it)."""
        self.control.send(("reap", pid))
        return self.control.recv()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.control.close()


class Rank:
    """Represents one rank process and its files."""

    def __init__(self, template: Template, number: int, port: int, folder: Path) -> None:
        self.template = template
        self.number = number
        self.log = folder / f"rank{number}.log"
        self.stacks = folder / f"rank{number}.stacks"
        self.connection, theirs = Pipe()
        self.pid = template.fork(theirs.fileno(), number, port, str(self.log), str(self.stacks))
        self.exit_code: int | None = None
        theirs.close()

    def stack(self) -> str:
        """Returns the current stacks of all its threads."""
        os.kill(self.pid, signal.SIGUSR1)
        found, deadline = "", time.monotonic() + STACK_SECONDS
        while time.monotonic() < deadline:
            time.sleep(0.1)
            before, found = found, read_log(self.stacks)
            if found and found == before:  # they are written line by line
                break
        return found

    def output(self) -> str:
        return read_log(self.log)[-OUTPUT_CHARS:]

    def end(self) -> int:
        """Kills the rank if it still lives, and returns its exit code."""
        if self.exit_code is None:
            os.killpg(self.pid, signal.SIGKILL)  # with the processes that Megatron starts to write checkpoints
            self.exit_code = self.template.reap(self.pid)
            self.connection.close()
        return self.exit_code


class RankPool:
    """Starts rank processes when a case first needs them, and ends them when it is closed."""

    def __init__(self, most: int = MAX_RANKS, cwd: Path | None = None) -> None:
        """Sets the limits of the pool; starts nothing yet.

        Args:
            most: processes that there may be.
            cwd: their working directory, which must outlive them; by default the caller's when they start.
        """
        self.most, self._cwd = most, cwd
        self._template: Template | None = None
        self._ranks: list[Rank] = []
        self._store: Any = None
        self._cases = 0
        self._folder = tempfile.TemporaryDirectory(prefix="ranks")
        self._plain: PlainProcess | None = None

    @property
    def plain(self) -> PlainProcess:
        """Returns the process that plain transformers run in, which shares nothing with the ranks."""
        if self._plain is None:
            self._plain = PlainProcess(Path(self._folder.name))
        return self._plain

    def run(
        self, world_size: int, fn: Callable[..., Any], *args: Any, timeout: float = 300, **kwargs: Any
    ) -> list[Any]:
        """Runs ``fn(*args, **kwargs)`` on ranks 0 to ``world_size - 1`` of a gloo world of that size.

        Args:
            world_size: 1 to ``most``.
            fn: a function at module level.
            timeout: seconds for the case (starting the processes not counted).

        Returns:
            The ranks' results in rank order; tensors come back as detached CPU tensors.

        Raises:
            RankError: a rank raised, died or did not end in time. The pool is then started anew.
        """
        if not 1 <= world_size <= self.most:
            raise ValueError(f"world_size {world_size}: the pool has 1 to {self.most} ranks")
        payload = pickle.dumps((fn, args, kwargs))
        ranks = self._started(world_size)
        self._cases += 1
        begun = time.time()
        for rank in ranks:
            _send(rank.connection, (self._cases, world_size, timeout, search_path(), payload))
        try:
            outcomes = _collect(ranks, timeout)
        except BaseException:  # whoever waits was stopped: the ranks are still at it
            self._give_up(begun)
            raise
        if len(outcomes) < len(ranks) or any(map(_has_failed, outcomes.values())):
            report = _report(ranks, outcomes, timeout)
            self._give_up(begun)
            raise RankError(report)
        for rank in ranks:
            _send(rank.connection, None)  # all are done with one another
        return [pickle.loads(outcomes[rank.number][0]) for rank in ranks]

    def renew(self) -> None:
        """Ends the ranks, so that the next case gets new ones, without the changes of cases before."""
        for rank in self._ranks:
            rank.end()
        self._ranks.clear()

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends all processes."""
        self.renew()
        if self._template is not None:
            self._template.close()
            self._template = None
        if self._plain is not None:
            self._plain.close()
            self._plain = None
        self._folder.cleanup()

    def _give_up(self, begun: float) -> None:
        """Ends ranks in the middle of a case, and deletes the cache files that they may have left half written."""
        self.renew()
        for path in (Path(self._folder.name) / CACHE).rglob("*"):
            if path.is_file() and path.stat().st_mtime >= begun - 1:
                path.unlink()

    def _started(self, count: int) -> list[Rank]:
        folder = Path(self._folder.name)
        if self._template is None:
            self._template = Template(folder, self._cwd)
        for number in range(len(self._ranks), count):
            self._ranks.append(Rank(self._template, number, self._port(), folder))
        return self._ranks[:count]

    def _port(self) -> int:
        """Returns the port of the store in this process, so that no two ranks race for a free port."""
        if self._store is None:
            from torch.distributed import TCPStore

            self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        return self._store.port


def cache_folder() -> Path:
    """Returns, in a rank, the folder that a pool's cases share for indices of mock data (50 MiB a split)."""
    return Path(os.environ[FOLDER]) / CACHE


def search_path() -> list[str]:
    """Returns this process's ``sys.path``, to which pytest adds folders of test modules as it goes."""
    return [path for path in dict.fromkeys(sys.path) if path]


def rebuild_tensor(data: bytes, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Rebuilds a tensor of a rank's result in this process."""
    element = getattr(torch, dtype)
    if not data:
        return torch.empty(shape, dtype=element)
    return torch.frombuffer(bytearray(data), dtype=element).reshape(shape)


def _send(connection: Connection, message: Any) -> None:
    """Sends a message; a dead receiver is found, and reported with its output, when its outcome is received."""
    with suppress(BrokenPipeError, ConnectionResetError):
        connection.send(message)


def _receive(connection: Connection) -> Any:
    """Returns the next message, or None when the other side has died."""
    try:
        return connection.recv()
    except (EOFError, ConnectionResetError):
        return None


def _collect(ranks: list[Rank], timeout: float) -> dict[int, Any]:
    """Maps rank numbers to messages, None for a rank that died; ranks that sent nothing in time are missing."""
    by_connection: dict[Connection, Rank] = {rank.connection: rank for rank in ranks}
    outcomes: dict[int, Any] = {}
    deadline = time.monotonic() + timeout
    while by_connection and (left := deadline - time.monotonic()) > 0:
        for connection in wait(list(by_connection), timeout=left):
            rank = by_connection.pop(connection)
            outcome = outcomes[rank.number] = _receive(connection)
            if _has_failed(outcome):
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
    return outcomes


def _has_failed(outcome: tuple[bytes | None, str | None] | None) -> bool:
    return outcome is None or outcome[1] is not None


def _report(ranks: list[Rank], outcomes: dict[int, Any], timeout: float) -> str:
    failures, waiting = [], []
    for rank in ranks:
        outcome = outcomes.get(rank.number, "running")
        if outcome == "running":
            waiting.append(f"--- rank {rank.number} was still running; its stacks:\n{rank.stack()}{_tail(rank)}")
        elif outcome is None:
            failures.append(f"--- rank {rank.number} died with exit code {rank.end()}{_tail(rank)}")
        elif outcome[1] is not None:
            failures.append(f"--- rank {rank.number} failed:\n{outcome[1]}{_tail(rank)}")
    head = f"{len(failures)} of {len(ranks)} ranks failed" if failures else f"no end after {timeout:g} s (hang?)"
    return "\n".join([head, *failures, *waiting])


def _tail(rank: Rank) -> str:
    output = rank.output().strip()
    return f"\n    its output:\n{output}" if output else ""


def init_megatron(
    tp: int = 1,
    pp: int = 1,
    vpp: int | None = None,
    cp: int = 1,
    ep: int = 1,
    etp: int | None = None,
    seed: int = 1234,
) -> ProcessGroupCollection:
    """Initialises Megatron's groups over a rank's world, and its random states as the trainer seeds them."""
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp,
        context_parallel_size=cp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
    )
    # megatron/training/initialize.py:428: pipeline stages differ, all else is the RNG tracker's.
    stage_seed = seed + 100 * parallel_state.get_pipeline_model_parallel_rank()
    torch.manual_seed(stage_seed)
    model_parallel_cuda_manual_seed(stage_seed)
    return ProcessGroupCollection.use_mpu_process_groups()
