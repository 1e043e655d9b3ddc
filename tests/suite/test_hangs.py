"""A test that hangs is named, with the stacks of what it has started."""

import os
import subprocess
import sys

from tests.process import ROOT

CASE = """\
import subprocess
import sys

def test_waits():
    code = "import time\\ndef sleep_here():\\n    time.sleep(600)\\nprint(flush=True)\\nsleep_here()"
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    child.stdout.read(1)
    try:
        child.wait()
    finally:
        child.kill()

def test_ends():
    pass
"""


def test_a_test_that_hangs_fails_with_the_stacks_of_what_it_started(tmp_path):
    case = tmp_path / "test_case.py"
    case.write_text(CASE)
    command = [sys.executable, "-m", "pytest", "-p", "tests.suite.hangs", "-p", "no:cacheprovider", "--timeout=1"]
    run = subprocess.run(
        [*command, f"--basetemp={tmp_path / 'temp'}", str(case)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 1
    assert "1 failed, 1 passed" in run.stdout
    assert "Failed: no end after 1 s" in run.stdout
    assert "sleep_here (<string>:3)" in run.stdout
    assert "child.wait()" in run.stdout  # its own stack
