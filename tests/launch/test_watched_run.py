"""A watched command: its log, its exit code, and no process left behind."""

import os
import signal
import subprocess
import sys

from megasched.launch.watched_run import INTERRUPTED, run_watched, tail
from tests.waiting import signalled

# Says its pid and waits, for longer than a test may take; asked to end, it leaves a file behind.
WAITS = """
import os, pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(pathlib.Path("asked").touch()))
print(os.getpid(), flush=True)
time.sleep(3600)
"""


def run(tmp_path, code, on_line=lambda line: None):
    command = [sys.executable, "-c", code]
    return run_watched(command, env=os.environ, log_path=tmp_path / "log", on_line=on_line)


def test_output_reaches_the_log_and_the_caller_and_the_exit_code_comes_back(tmp_path):
    lines = []
    code = run(tmp_path, "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)", lines.append)
    assert code == 3
    assert sorted(lines) == ["err", "out"]
    assert sorted((tmp_path / "log").read_text().split()) == ["err", "out"]


def test_sigterm_ends_the_command(tmp_path, monkeypatch):
    """As a Ctrl-C or a scheduler would have it end. It is asked, and not killed when it has had its time."""
    monkeypatch.chdir(tmp_path)
    pids = []
    with signalled(signal.SIGTERM, lambda: pids):
        code = run(tmp_path, WAITS, lambda line: pids.append(int(line)))
    assert code == INTERRUPTED
    assert (tmp_path / "asked").exists()
    assert subprocess.run(["kill", "-0", str(pids[0])], capture_output=True).returncode != 0


def test_the_former_signal_handler_is_back_afterwards(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    run(tmp_path, "pass")
    assert signal.getsignal(signal.SIGTERM) is before


def test_tail(tmp_path):
    path = tmp_path / "log"
    path.write_text("".join(f"{number}\n" for number in range(100)))
    assert tail(path, lines=3) == "97\n98\n99"
