"""Runs the processes of the rank pool: a template that has imported everything, and ranks forked from it.

A rank has CUDA emulated, makes a gloo world for each case and resets Megatron's global state after it.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import io
import os
import pickle
import signal
import sys
import traceback
from argparse import ArgumentParser
from datetime import timedelta
from functools import cache
from importlib import import_module
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from typing import Any, NamedTuple

import torch

from megasched.collector import collector_paused
from megasched.trainer.flags.rehearsal import without_kernel_packages
from megasched.verify.ranks.pool import rebuild_tensor

# What the pool applies in every rank; what a case adds is taken back after it.
PATCHES = ("dataset_helpers", "adamw_resume", "fp32_resume", "results_queue")
# What a run of the trainer imports, and much of it late: two seconds of each rank if it did that itself.
IMPORTS = (
    "megasched.analysis.roles.infer",
    "megasched.launch.pretrain_gpt",
    "megasched.launch.pretraining",
    "megasched.trainer.session_from_args",
    "megasched.trainer.builder",
    "megasched.trainer.entry",
    "megasched.trainer.checkpoint.one_writer",
    "megasched.trainer.scheduled_model",
    "megasched.trainer.session",
    "megasched.trainer.checkpoint.source",
    "megasched.model_adapters.default_schedule",
    "megasched.model_adapters.generic",
    "megasched.weights.hf.folder",
    "megasched.weights.progress",
    "megatron.core.models.mimo",
    "megatron.core.tokenizers.text",
    "megatron.training.training",
)
# What is at the top of transformers is imported with all that it needs when it is first asked for.
OF_TRANSFORMERS = ("AutoModelForCausalLM", "GenerationMixin", "ProcessorMixin")
SEED = 1234


class Job(NamedTuple):
    """Describes one case; to unpickle ``payload``, a pickled (function, args, kwargs), takes ``sys_path``."""

    number: int
    world_size: int
    timeout: float
    sys_path: list[str]
    payload: bytes


class ResultPickler(pickle.Pickler):
    """Pickles tensors as plain values: unpickling torch's own form would import Megatron where they arrive."""

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, torch.Tensor):
            return NotImplemented
        flat = obj.detach().as_subclass(torch.Tensor).cpu().contiguous().reshape(-1)
        data = flat.view(torch.uint8).numpy().tobytes()
        return rebuild_tensor, (data, str(obj.dtype).removeprefix("torch."), tuple(obj.shape))


def dump(result: Any) -> bytes:
    buffer = io.BytesIO()
    ResultPickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(result)
    return buffer.getvalue()


def prepare() -> None:
    """Emulates CUDA, applies the patches and makes the imports that cost, once for all ranks."""
    import transformers

    from megasched.patches import apply_each, host_cuda

    without_kernel_packages()
    torch.set_num_threads(1)
    host_cuda.install(force=True)
    apply_each(PATCHES)
    for name in IMPORTS:
        import_module(name)
    for name in OF_TRANSFORMERS:
        getattr(transformers, name)
    remember_help_of_flags()


def remember_help_of_flags() -> None:
    """Caches the help texts of Megatron's flags.

    Megatron finds them in the source of its classes, again for each parser; a run makes three, which was a fifth
    of a short run's time.
    """
    from megatron.training.argument_utils import ArgumentGroupFactory
    from megatron.training.arguments import add_megatron_arguments

    read = ArgumentGroupFactory._get_field_docstrings
    known: dict[type, dict[str, str]] = {}

    def remembered(factory: Any, config_class: type) -> dict[str, str]:
        if config_class not in known:
            known[config_class] = read(factory, config_class)
        return known[config_class]

    ArgumentGroupFactory._get_field_docstrings = remembered
    add_megatron_arguments(ArgumentParser())  # all of them, before there are ranks


def reset_megatron() -> None:
    """Resets Megatron to no groups, no global args, no RNG states and no patches of the case before.

    It runs once a case is over, not when the next one begins: groups have threads, which would wake up meanwhile.
    """
    from megatron.core.tensor_parallel.random import initialize_rng_tracker
    from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker
    from megatron.training import async_utils, checkpointing, training
    from megatron.training.training import destroy_global_state
    from torch.distributed.tensor import debug

    from megasched.patches import active, apply_each, undo_each

    undo_each(name for name in reversed(active()) if name not in (*PATCHES, "host_cuda"))
    apply_each(PATCHES)
    destroy_global_state()
    destroy_moe_metrics_tracker()
    checkpointing._CHECKPOINT_VERSION = checkpointing._LOADED_ITERATION = None
    async_utils._async_calls_queue = None  # which counts the saves, and ranks of the next case must have as many
    # Left over on some ranks only, they would make pretrain() reduce what the other ranks do not.
    training._STARTUP_TIMESTAMPS.update(dict.fromkeys(training._STARTUP_TIMESTAMPS))
    initialize_rng_tracker(force_reset=True)
    let_go_of_groups()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    debug._clear_sharding_prop_cache()  # DTensors of the same ranks would get the mesh of groups that are gone
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    torch.manual_seed(SEED)
    gc.collect()
    gc.freeze()  # the modules that a case has imported stay; no collection has to look through them again


def let_go_of_groups() -> None:
    """Takes the process groups from what the case before left behind.

    Megatron's data parallel wrapper hooks onto autograd's nodes, which keep it, its parameters and the optimizer
    alive in a ring that Python does not see. Each gloo group among them has threads that wake up 100 times a
    second.
    """
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.optimizer import MegatronOptimizer

    holders = cache(lambda kind: issubclass(kind, DistributedDataParallel | MegatronOptimizer))
    for left in gc.get_objects():
        if holders(type(left)):
            vars(left).clear()


def run_job(job: Job, rank: int, store: Any, environment: dict[str, str]) -> Any:
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
    """Serves jobs in a rank, one after the other, until the pool hangs up.

    Megatron is reset before the first job, and after each one when all ranks have done theirs.

    What it sends of a job is a pickled result and None, or None and the traceback of its failure.
    """
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(GLOO_SOCKET_IFNAME="lo")
    environment = dict(os.environ)
    store = torch.distributed.TCPStore("127.0.0.1", port, is_master=False)
    reset_megatron()
    while True:
        try:
            message = connection.recv()
        except EOFError:
            return
        if message is None:
            reset_megatron()
            continue
        job = Job(*message)
        os.ftruncate(sys.stdout.fileno(), 0)
        try:
            outcome = dump(run_job(job, rank, store, environment)), None
        except BaseException:
            outcome = None, traceback.format_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        connection.send(outcome)


def become_rank(descriptor: int, rank: int, port: int, log: str, stacks: str) -> None:
    """Turns a fork into a rank: own output file, stacks on SIGUSR1, and no life after the template's."""
    die_with_parent()
    os.setpgid(0, 0)  # what it starts is ended with it
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    stack_file = open(stacks, "w")  # noqa: SIM115 (faulthandler needs it as long as the process lives)
    faulthandler.register(signal.SIGUSR1, file=stack_file, all_threads=True)
    start_results_queue()
    serve(Connection(descriptor), rank, port)


def start_results_queue() -> None:
    """Forks the process that a checkpoint's writers need while there is one thread.

    The first save would spawn it instead and import all of this anew, which takes seconds of each rank.
    """
    from megatron.core.dist_checkpointing.strategies.filesystem_async import get_write_results_queue

    get_write_results_queue(mp_mode="fork")


def die_with_parent() -> None:
    """Makes this process die with its parent (1: PR_SET_PDEATHSIG), even while it waits in a collective."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def main() -> None:
    """Runs the template: imports everything, then forks a rank for each request and reaps it on request.

    Argument: file descriptor of the connection to the pool. It has one thread, so that forking is safe.
    """
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all: the pool's process ends these, in silence
    control = Connection(int(sys.argv[1]))
    with collector_paused():
        prepare()
    gc.freeze()
    control.send("ready")
    while True:
        try:
            request, *details = control.recv()
        except EOFError:
            os._exit(0)  # what is frozen would be called leaked (``imports.end_quickly``)
        if request == "fork":
            descriptor = recv_handle(control)
            pid = os.fork()
            if pid == 0:
                control.close()
                become_rank(descriptor, *details)
                os._exit(0)
            os.close(descriptor)
            control.send(pid)
        elif request == "reap":
            control.send(os.waitstatus_to_exitcode(os.waitpid(*details, 0)[1]))


if __name__ == "__main__":
    main()
