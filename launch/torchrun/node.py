"""torchrun on one host, which ends with the status of the rank that failed first.

torchrun's own status is 1 whatever happened, and a launcher must know a refused command (2) or numbers that differ
when computed again (17) from a failure that a restart may mend. The arguments are torchrun's.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Collection

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.run import parse_args, run

# Ranks that fail together do so within; torchrun notes whole seconds.
SECONDS_TOGETHER = 10


def main() -> None:
    try:
        run(parse_args(sys.argv[1:]))
    except ChildFailedError as error:
        print(error, file=sys.stderr)
        status = first_failure(error.failures.values()).exitcode
        sys.exit(status if status > 0 else 128 - status)
    except SignalException as ended:
        print(f"torchrun: {ended}", file=sys.stderr)
        sys.exit(128 + ended.sigval)


def first_failure(failures: Collection[ProcessFailure]) -> ProcessFailure:
    """Of ranks that torchrun found ended when it looked, the one that ended the others.

    It looks some ten times a second, and where it finds several it takes the lowest rank. But a rank that loses
    another ends with 1, and the lost one by a signal or with a status of its own. torchrun then ends what is left
    by SIGTERM, and by SIGKILL 30 s later, and counts those among the failures.
    """
    begun = min(failure.timestamp for failure in failures)

    def key(failure: ProcessFailure) -> tuple[bool, bool, bool, int]:
        late = failure.timestamp - begun > SECONDS_TOGETHER
        return late, failure.exitcode == -signal.SIGTERM, failure.exitcode == 1, failure.timestamp

    return min(failures, key=key)


if __name__ == "__main__":
    main()
