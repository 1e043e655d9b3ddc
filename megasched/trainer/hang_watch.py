"""Ends a rank that makes no step any more, after printing where it is: ``--hang-timeout-minutes``.

A collective that one rank never joins blocks all others, and the stacks of all ranks show which one is to blame.
So a rank that has printed its stacks waits a little before it ends: a launcher stops all ranks as soon as one has
ended. ``faulthandler`` waits in a thread without Python, and the timer is the kernel's: both work while the
interpreter is blocked in compiled code.
"""

from __future__ import annotations

import argparse
import faulthandler
import math
import os
import signal
import sys

from megasched.errors import ConfigError

FLAG = "--hang-timeout-minutes"
#: Seconds between a rank's stacks and its end. Ranks begin a step at about the same time, not at the same.
GRACE = 10
#: Seconds between the stacks of two ranks of a node: they are written in pieces, often to one terminal or file.
STAGGER = 0.25


def minutes(text: str) -> float:
    """Parses the flag's value; a type for argparse.

    Raises:
        argparse.ArgumentTypeError: it is not a positive number.
    """
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 < found < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no positive number of minutes")
    return found


class HangWatch:
    """Watches the steps of this process and ends it when none comes.

    Args:
        minutes: time without a step after which all stacks are printed; ``GRACE`` seconds later SIGALRM ends the
            process.
    """

    def __init__(self, minutes: float) -> None:
        self.seconds = 60 * minutes + STAGGER * int(os.environ.get("LOCAL_RANK", "0"))
        if not faulthandler.is_enabled():
            faulthandler.enable()
        try:
            sys.stderr.fileno()
        except (AttributeError, OSError) as error:
            raise ConfigError(f"{FLAG}: stderr is no file that a thread without Python can write to") from error
        signal.signal(signal.SIGALRM, signal.SIG_DFL)

    def step(self) -> None:
        """Restarts the timer, as a step begins or has ended."""
        faulthandler.dump_traceback_later(self.seconds)
        signal.setitimer(signal.ITIMER_REAL, self.seconds + GRACE)

    def end(self) -> None:
        """Stops the timer, as no step is waited for any more."""
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_REAL, 0)
