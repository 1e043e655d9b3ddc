"""The process behind the queue of the checkpoint writers, after the rank that started it was killed."""

import os
import signal
import sys
from contextlib import suppress
from types import ModuleType

import psutil

from megasched.patches import apply, undo


def manager_of_a_killed_process() -> psutil.Process:
    """What a child of this rank has started for its queue."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        filesystem_async._results_queue = None
        manager = filesystem_async.get_write_results_queue()._manager
        os.write(writing, str(manager._process.pid).encode())
        os.kill(os.getpid(), signal.SIGKILL)
    os.close(writing)
    with os.fdopen(reading) as said:
        found = psutil.Process(int(said.read(20)))
    os.waitpid(child, 0)
    return found


def survives_without() -> bool:
    """Whether the process of an unpatched queue is there when that of a patched one, begun later, has ended."""
    undo("results_queue")
    without = manager_of_a_killed_process()
    try:
        apply("results_queue")
        psutil.wait_procs([manager_of_a_killed_process()])
        return without.is_running() and without.status() != psutil.STATUS_ZOMBIE
    finally:
        with suppress(psutil.NoSuchProcess):
            without.kill()


def test_it_ends_with_its_rank_and_would_not_without_the_patch(ranks):
    assert ranks.run(1, survives_without) == [True]


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
