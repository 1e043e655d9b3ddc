"""Runs a command that gets SIGTERM when the process that started it is gone, even by SIGKILL (Linux only).

    python -m megasched.launch.with_parent PARENT_PID COMMAND ...

It is a separate process, which becomes the command: where the parent has threads, no Python can run safely between
a fork and the program.
"""

from __future__ import annotations

import os
import signal
import sys

from megasched.parent_process import end_with_parent


def main() -> None:
    parent, *command = sys.argv[1:]
    end_with_parent(signal.SIGTERM)
    if os.getppid() == int(parent):  # it may be gone already
        os.execvp(command[0], command)


if __name__ == "__main__":
    main()
