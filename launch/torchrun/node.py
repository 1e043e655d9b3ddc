"""Runs torchrun on one host, and ends with the status of the rank that failed first.

torchrun's own status is 1 after any failure. A launcher must tell a refused command (2), or numbers that differ
when computed again (17), from a failure that a restart may mend. The arguments are torchrun's.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Collection

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.run import parse_args, run

from megasched.trainer.run_failure import PRINTED_LAST

# Ranks that fail together do so within; torchrun notes whole seconds.
SECONDS_TOGETHER = 10


def main() -> None:
    args = parse_args(sys.argv[1:])
    if args.redirects == args.tee == "0":  # else each rank has a file, in which its block should be
        os.environ[PRINTED_LAST] = "1"
    try:
        run(args)
    except ChildFailedError as error:
        failure = first_failure(error.failures.values())
        print(last_words(failure, error), file=sys.stderr)
        sys.exit(failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode)
    except SignalException as ended:
        print(f"torchrun: {ended}", file=sys.stderr)
        sys.exit(128 + ended.sigval)


def last_words(failure: ProcessFailure, error: ChildFailedError) -> str:
    """Returns what a rank has written down before its end, or torchrun's report of a rank that has not."""
    return failure.message["message"] if isinstance(failure.message, dict) else str(error)


def first_failure(failures: Collection[ProcessFailure]) -> ProcessFailure:
    """Returns the failure that caused the others, among those that torchrun found when it looked.

    torchrun looks some ten times a second, and of several failures it takes that of the lowest rank. But a rank
    that loses another one ends with 1, and the lost one by a signal or with another status. torchrun then ends the
    remaining ranks by SIGTERM, and by SIGKILL 30 s later, and counts those among the failures.
    """
    begun = min(failure.timestamp for failure in failures)

    def key(failure: ProcessFailure) -> tuple[bool, bool, bool, int]:
        late = failure.timestamp - begun > SECONDS_TOGETHER
        return late, failure.exitcode == -signal.SIGTERM, failure.exitcode == 1, failure.timestamp

    return min(failures, key=key)


if __name__ == "__main__":
    main()
