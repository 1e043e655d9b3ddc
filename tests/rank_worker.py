"""One rank process of the pool: emulated CUDA, a gloo world for each case, Megatron's global state reset."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import io
import os
import pickle
import signal
import sys
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from tests.rank_pool import rebuild_tensor

# What the pool applies in every rank; what a case adds is taken back after it.
PATCHES = ("wheel_helpers", "adamw_resume", "fp32_resume")
SEED = 1234


class Job(NamedTuple):
    """One case; ``payload`` is (function, args, kwargs), still pickled: to unpickle it needs ``sys_path``."""

    number: int
    world_size: int
    timeout: float
    sys_path: list[str]
    payload: bytes


class Outcome(NamedTuple):
    """What a rank hands back: a pickled result, or the traceback of its failure."""

    number: int
    result: bytes | None
    failure: str | None


class ResultPickler(pickle.Pickler):
    """Sends tensors as plain values: as torch does it, Megatron would be imported where they arrive."""

    def reducer_override(self, obj: Any) -> Any:
        import torch

        if not isinstance(obj, torch.Tensor):
            return NotImplemented
        flat = obj.detach().as_subclass(torch.Tensor).cpu().contiguous().reshape(-1)
        data = flat.view(torch.uint8).numpy().tobytes()
        return rebuild_tensor, (data, str(obj.dtype).removeprefix("torch."), tuple(obj.shape))


def dump(result: Any) -> bytes:
    buffer = io.BytesIO()
    ResultPickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(result)
    return buffer.getvalue()


def prepare(rank: int, port: int) -> Any:
    """The imports that cost, once; returns the client of the pool's store."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
    import torch
    from megasched.patches import apply, host_cuda

    torch.set_num_threads(1)
    host_cuda.install(force=True)
    for name in PATCHES:
        apply(name)
    import megatron.training.training  # noqa: F401

    return torch.distributed.TCPStore("127.0.0.1", port, is_master=False)


def reset_megatron() -> None:
    """No groups, no global args, no RNG states, no patches of the case before."""
    import torch
    from megasched.patches import active, apply, undo
    from megatron.core.tensor_parallel.random import initialize_rng_tracker
    from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker
    from megatron.training import checkpointing
    from megatron.training.training import destroy_global_state

    for name in reversed(active()):
        if name not in (*PATCHES, "host_cuda"):
            undo(name)
    for name in PATCHES:
        apply(name)
    destroy_global_state()
    destroy_moe_metrics_tracker()
    checkpointing._CHECKPOINT_VERSION = checkpointing._LOADED_ITERATION = None
    initialize_rng_tracker(force_reset=True)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    torch.manual_seed(SEED)
    gc.collect()


def run_job(job: Job, rank: int, store: Any, environment: dict[str, str]) -> Any:
    import torch

    reset_megatron()
    os.environ.clear()
    os.environ.update(environment, WORLD_SIZE=str(job.world_size), LOCAL_WORLD_SIZE=str(job.world_size))
    sys.path[:] = job.sys_path
    sys.argv[:] = ["rank_pool"]
    torch.distributed.init_process_group(
        "gloo",
        store=torch.distributed.PrefixStore(f"case{job.number}", store),
        rank=rank,
        world_size=job.world_size,
        # The pool's own limit comes first: it shows where every rank stands.
        timeout=timedelta(seconds=2 * job.timeout + 60),
    )
    function, args, kwargs = pickle.loads(job.payload)
    return function(*args, **kwargs)


def serve(connection: Connection, rank: int, port: int) -> None:
    store = prepare(rank, port)
    environment = dict(os.environ)
    connection.send("ready")
    while True:
        try:
            job = Job(*connection.recv())
        except EOFError:
            return
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            with contextlib.suppress(OSError):
                os.ftruncate(stream.fileno(), 0)
        try:
            outcome = Outcome(job.number, dump(run_job(job, rank, store, environment)), None)
        except BaseException:
            outcome = Outcome(job.number, None, traceback.format_exc())
        sys.stdout.flush()
        sys.stderr.flush()
        connection.send(tuple(outcome))


def main() -> None:
    """Arguments: rank, connection's file descriptor, store's port, file for stacks."""
    rank, descriptor, port, stacks = sys.argv[1:]
    # A rank that waits in a collective would outlive a killed pytest (1: PR_SET_PDEATHSIG).
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    stack_file = open(stacks, "w")  # noqa: SIM115 (faulthandler needs it as long as the process lives)
    faulthandler.register(signal.SIGUSR1, file=stack_file, all_threads=True)
    serve(Connection(int(descriptor)), int(rank), int(port))


if __name__ == "__main__":
    main()
