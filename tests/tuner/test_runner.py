"""Trials as processes: their scores, and nothing left of those that take too long."""

import sys
import textwrap
from pathlib import Path

import psutil
import pytest

from megasched.errors import ConfigError
from megasched.tuner.runner import SubprocessRunner
from megasched.tuner.space import Space
from tests.tuner.trainer import milliseconds
from tests.waiting import until

TRAINER = Path(__file__).with_name("trainer.py")


@pytest.fixture
def space():
    space = Space()
    space.choice("micro_batch_size", [1, 3, 4, 8])
    space.choice("layers", [0, 3], flag="--recompute-num-layers")
    return space


def run(space, tmp_path, point, *more, timeout=60.0):
    command = [sys.executable, str(TRAINER), *more]
    return SubprocessRunner(command, space, tmp_path / "logs", timeout=timeout, iterations=6).run(7, point)


def test_outcomes_of_runs(space, tmp_path):
    found = run(space, tmp_path, {"micro_batch_size": 8, "layers": 3})
    assert found.seconds == pytest.approx(milliseconds(8, 3) / 1000)
    assert found.score == pytest.approx(8 / found.seconds)
    assert (tmp_path / "logs" / "trial-7.log").read_text().count("iteration  ") == 6
    assert run(space, tmp_path, {"micro_batch_size": 8, "layers": 0}).outcome == "oom"
    refused = run(space, tmp_path, {"micro_batch_size": 3, "layers": 0})
    assert (refused.outcome, refused.why) == ("refused", "micro-batches of 3 are not for this trainer")
    unknown = run(space, tmp_path, {"micro_batch_size": 1, "layers": 0}, "--unknown-flag")
    assert (unknown.outcome, unknown.why) == ("refused", "unrecognized arguments: --unknown-flag")


class OnceItSpeaks(SubprocessRunner):
    """A trial's time begins when it has said something, however long its start has taken."""

    @property
    def timeout(self):
        until(lambda: self.log(0).read_text())
        return self._timeout

    @timeout.setter
    def timeout(self, seconds):
        self._timeout = seconds


def test_a_run_that_takes_too_long_is_ended_with_its_children(space, tmp_path):
    """As torchrun does, it starts its child in a session of its own, and does not tell it to end."""
    script = tmp_path / "launcher.py"
    script.write_text(
        textwrap.dedent(
            """
            import signal, subprocess, sys, time
            signal.signal(signal.SIGTERM, lambda *_: sys.exit("asked to end"))
            sleep = [sys.executable, "-c", "import time; time.sleep(3600)"]
            child = subprocess.Popen(sleep, start_new_session=True)
            print(child.pid, flush=True)
            time.sleep(3600)
            """
        )
    )
    runner = OnceItSpeaks([sys.executable, str(script)], space, tmp_path, timeout=1.0, iterations=6)
    found = runner.run(0, {"micro_batch_size": 1, "layers": 0})
    assert (found.outcome, found.why) == ("timeout", "it was ended after 1 s")
    child, *said = (tmp_path / "trial-0.log").read_text().splitlines()
    assert said == ["asked to end"]  # and not killed when it has had its time
    until(lambda: not runs(int(child)))


def runs(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_no_such_program(space, tmp_path):
    with pytest.raises(ConfigError, match="no-such-program: it can't be started: No such file"):
        SubprocessRunner(["no-such-program"], space, tmp_path, timeout=1, iterations=6).run(0, {})
