"""The processes that save checkpoints, after the rank that started them was killed or has failed."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from types import ModuleType

import psutil
import pytest

from megasched.patches import apply, undo


def of_queue() -> int:
    """Starts the process of the queue; its pid."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    filesystem_async._results_queue = None
    return filesystem_async.get_write_results_queue()._manager._process.pid


def of_worker() -> int:
    """Starts the process that ``--use-persistent-ckpt-worker`` keeps; its pid."""
    from megatron.core.dist_checkpointing.strategies.async_utils import PersistentAsyncCaller

    return PersistentAsyncCaller._get_process(0, "fork").pid


def started_by_a_killed_process(start) -> psutil.Process:
    """What a child of this rank has started."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.write(writing, f"{start()}\n".encode())  # what it has started may hold this open
        os.kill(os.getpid(), signal.SIGKILL)
    os.close(writing)
    with os.fdopen(reading) as said:
        found = psutil.Process(int(said.readline()))
    os.waitpid(child, 0)
    return found


def survives_without(start) -> bool:
    """Whether the process without the patch is there when that of a patched rank, begun later, has ended."""
    undo("results_queue")
    without = started_by_a_killed_process(start)
    try:
        apply("results_queue")
        psutil.wait_procs([started_by_a_killed_process(start)])
        return without.is_running() and without.status() != psutil.STATUS_ZOMBIE
    finally:
        with suppress(psutil.NoSuchProcess):
            without.kill()


@pytest.mark.parametrize("start", [of_queue, of_worker])
def test_it_ends_with_its_rank_and_would_not_without_the_patch(ranks, start):
    assert ranks.run(1, survives_without, start) == [True]


def test_a_rank_that_fails_ends_what_it_has_started():
    code = "import time; from multiprocessing import get_context; from megasched.trainer.run_failure import end\n"
    code += "get_context('fork').Process(target=time.sleep, args=(600,), daemon=True).start(); end(3)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60)  # its output is closed
    assert ended.returncode == 3


def begins_the_script(script: str) -> bool:
    """Whether the process, as it is spawned, runs the script of this one; the queue has to take what is put in."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    running, forked = sys.modules["__main__"], filesystem_async._results_queue
    sys.modules["__main__"] = ModuleType("__main__")
    sys.modules["__main__"].__file__ = script
    filesystem_async._results_queue = None
    try:
        queue = filesystem_async.get_write_results_queue()
        queue.put("written")
        assert queue.get(timeout=60) == "written"
        assert sys.modules["__main__"].__file__ == script
        return os.path.exists(f"{script}.ran")
    finally:
        filesystem_async._results_queue._manager.shutdown()
        filesystem_async._results_queue = forked
        sys.modules["__main__"] = running


def with_and_without(script: str) -> tuple[bool, bool]:
    patched = begins_the_script(script)
    undo("results_queue")
    try:
        return patched, begins_the_script(script)
    finally:
        apply("results_queue")


def test_the_first_save_does_not_wait_for_a_second_import_of_the_script(ranks, tmp_path):
    script = tmp_path / "script.py"
    script.write_text("open(f'{__file__}.ran', 'w').close()")
    assert ranks.run(1, with_and_without, str(script)) == [(False, True)]
