"""The process behind the queue of the checkpoint writers, after the rank that started it was killed."""

import os
import signal
from contextlib import suppress

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
