"""A test that hangs is named, with the stacks of what it has started."""

from tests.suite.inner import run_pytest

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
    (tmp_path / "test_case.py").write_text(CASE)
    run = run_pytest(tmp_path, "tests.suite.hangs", "--timeout=1")
    assert run.returncode == 1
    assert "1 failed, 1 passed" in run.stdout
    assert "Failed: no end after 1 s" in run.stdout
    assert "sleep_here (<string>:3)" in run.stdout
    assert "child.wait()" in run.stdout  # its own stack
