"""``--hang-timeout-minutes``: a rank that makes no step any more says where it is, and ends.

A collective that one rank never joins blocks all others, and which one is to blame shows in the stacks of all.
``faulthandler`` waits, in a thread without Python: so it works while the interpreter is blocked in compiled code.
"""

from __future__ import annotations

import argparse
import faulthandler
import math
import sys

from megasched.errors import ConfigError

FLAG = "--hang-timeout-minutes"


def minutes(text: str) -> float:
    """The flag's value; a type for argparse.

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
    """Of this process.

    Args:
        minutes: without a step, after which all stacks are printed and the process ends with status 1.
    """

    def __init__(self, minutes: float) -> None:
        self.seconds = 60 * minutes
        if not faulthandler.is_enabled():
            faulthandler.enable()
        try:
            sys.stderr.fileno()
        except (AttributeError, OSError) as error:
            raise ConfigError(f"{FLAG}: stderr is no file that a thread without Python can write to") from error

    def step(self) -> None:
        """A step begins or has ended: the time runs anew."""
        faulthandler.dump_traceback_later(self.seconds, exit=True)

    def end(self) -> None:
        """No step is waited for any more."""
        faulthandler.cancel_dump_traceback_later()
