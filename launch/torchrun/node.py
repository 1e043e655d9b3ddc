"""torchrun on one host, which ends with the status of the rank that failed first.

torchrun's own status is 1 whatever happened, and a launcher must know a refused command (2) or numbers that differ
when computed again (17) from a failure that a restart may mend. The arguments are torchrun's.
"""

from __future__ import annotations

import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import parse_args, run


def main() -> None:
    try:
        run(parse_args(sys.argv[1:]))
    except ChildFailedError as error:
        print(error, file=sys.stderr)
        _, first = error.get_first_failure()
        sys.exit(first.exitcode if first.exitcode > 0 else 128 - first.exitcode)
    except SignalException as ended:
        print(f"torchrun: {ended}", file=sys.stderr)
        sys.exit(128 + ended.sigval)


if __name__ == "__main__":
    main()
