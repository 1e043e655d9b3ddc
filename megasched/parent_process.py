"""The process that started this one, whose end is to be this one's. Linux."""

from __future__ import annotations

import ctypes
import signal

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with_parent(sent: signal.Signals) -> None:
    """Has the kernel send this process a signal when the one that started it is gone."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, sent):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
