"""Trials as processes: their scores, and nothing left of those that take too long."""

import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from megasched.errors import ConfigError
from megasched.tuner.runner import SubprocessRunner
from megasched.tuner.space import Space
from tests.tuner.trainer import milliseconds

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


def test_a_run_that_takes_too_long_is_ended_with_its_children(space, tmp_path):
    """As torchrun does, it starts its child in a session of its own, and does not tell it to end."""
    script = tmp_path / "launcher.py"
    script.write_text(
        textwrap.dedent(
            """
            import subprocess, sys, time
            sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
            child = subprocess.Popen(sleep, start_new_session=True)
            print(child.pid, flush=True)
            time.sleep(600)
            """
        )
    )
    start = time.monotonic()
    runner = SubprocessRunner([sys.executable, str(script)], space, tmp_path, timeout=2.0, iterations=6)
    found = runner.run(0, {"micro_batch_size": 1, "layers": 0})
    assert (found.outcome, found.why) == ("timeout", "it was ended after 2 s")
    assert time.monotonic() - start < 20
    child = int((tmp_path / "trial-0.log").read_text())
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


def test_no_such_program(space, tmp_path):
    with pytest.raises(ConfigError, match="no-such-program: it can't be started: No such file"):
        SubprocessRunner(["no-such-program"], space, tmp_path, timeout=1, iterations=6).run(0, {})
