"""Ends this process when the process that started it ends. Linux only."""

from __future__ import annotations

import ctypes
import signal

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with_parent(sent: signal.Signals) -> None:
    """Asks the kernel to send this process a signal when its parent process is gone."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, sent):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
