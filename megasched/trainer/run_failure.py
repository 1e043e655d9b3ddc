"""Ends a run that has failed: one block says what is wrong and where, and it is the last that is printed.

The rank prints it, and hands it to torchrun (``TORCHELASTIC_ERROR_FILE``), which prints it at the end of its own
report. ``megasched.launch.torchrun.node`` prints it alone there, and its ranks then don't. What megasched raises
on purpose is the block alone, anything else is a traceback and the block.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
import traceback
from multiprocessing import active_children
from pathlib import Path
from typing import NoReturn

from megasched.errors import MegaschedError
from megasched.files import write_whole
from megasched.reading.files import printable

TRACEBACK = "MEGASCHED_TRACEBACK"
# Where torchrun looks for what a rank has died of.
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
# Set by a launcher that prints a rank's block itself, where the rank would print it.
PRINTED_LAST = "MEGASCHED_ERROR_PRINTED_LAST"
# What a block begins with, of an error that is raised on purpose and of any other.
ERROR, FAILED = "megasched: error", "megasched: the run failed"

# Exit status of what megasched raises on purpose.
REFUSED = 2
# How long a rank other than 0 holds its message back: mostly the fault is everybody's, rank 0 has said it
# and the launcher ends this process meanwhile. Staggered, so that of several such ranks one speaks.
GRACE_SECONDS = 4.0
STAGGER_SECONDS = 0.2
STAGGERED_RANKS = 15
# What gloo and NCCL say of a rank that has gone.
AFTERMATH = re.compile(r"Connection (?:closed|reset) by peer|remote process exited")


def describe_failure(error: BaseException) -> str:
    """Returns what is wrong, and where, unless the text of the error says so itself."""
    if isinstance(error, MegaschedError):
        return str(error)
    raised = traceback.extract_tb(error.__traceback__)[-1:]
    what, cause = _named(error), error.__cause__
    while cause is not None and cause.__cause__ is not None:
        cause = cause.__cause__
    lines = [line for frame in raised for line in (f"at: {frame.filename}:{frame.lineno}", f"    {frame.line}")]
    reason = [f"because of: {_named(cause)}"] if cause is not None else []
    return "\n    ".join([what, *lines, *reason])


def _named(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def end_with_error(error: BaseException) -> NoReturn:
    """Prints what is wrong, once for the job where that can be arranged, and ends this process.

    The status is 2 for what megasched raises on purpose, and 1 for anything else.
    """
    on_purpose = isinstance(error, MegaschedError)
    rank = rank_of("RANK", "SLURM_PROCID")
    await_rank_0(lost=not on_purpose and AFTERMATH.search(str(error)) is not None)
    if not on_purpose or os.environ.get(TRACEBACK) == "1":
        traceback.print_exception(error)
    where = f" on rank {rank}" if rank else ""
    block = f"{ERROR if on_purpose else FAILED}{where}: {printable(describe_failure(error))}"
    told = _tell_torchrun(block)
    if not (told and os.environ.get(PRINTED_LAST)):
        print(block, file=sys.stderr)
    end(REFUSED if on_purpose else 1)


def _tell_torchrun(block: str) -> bool:
    """Writes the block as torchrun's ``record`` writes an exception, in the field that torchrun prints.

    Returns:
        Whether it could: there is a torchrun, and its disk is not full, say.
    """
    path = os.environ.get(ERROR_FILE)
    if not path:
        return False
    extra = {"py_callstack": block, "timestamp": str(int(time.time()))}
    try:
        write_whole(Path(path), [json.dumps({"message": {"message": block, "extraInfo": extra}})])
    except OSError:
        return False
    return True


def rank_of(*names: str) -> int:
    """Returns the value of the first variable that torchrun or Slurm has set; 0 where none is set."""
    return int(next((os.environ[name] for name in names if os.environ.get(name)), "0"))


def await_rank_0(*, lost: bool = False) -> None:
    """Waits on every rank but 0, so that the launcher may end this one if rank 0 has failed.

    Args:
        lost: another rank has gone, and has said why: all ranks wait, so that the status is that one's.
    """
    if lost or rank_of("RANK", "SLURM_PROCID"):
        local = min(rank_of("LOCAL_RANK", "SLURM_LOCALID"), STAGGERED_RANKS)
        time.sleep(GRACE_SECONDS + STAGGER_SECONDS * local)


def end(status: int) -> NoReturn:
    """Ends this process at once: NCCL's and gloo's threads may wait for ranks that never come.

    Processes that it has started, to save or to read data, would live on and hold its output open.
    """
    for child in active_children():
        child.kill()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
