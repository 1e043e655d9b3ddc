"""A file that leaves something changed is named, and the file after it runs all the same."""

from tests.suite.inner import run_pytest

FIRST = """\
import os

def test_sets():
    os.environ["OF_A_TEST"] = "1"

def test_passes():
    pass
"""
SECOND = """\
def test_puts_back(monkeypatch):
    monkeypatch.setenv("OF_ANOTHER", "1")
"""


def test_a_file_that_leaves_a_variable_behind_is_named(tmp_path):
    for name, text in (("test_first.py", FIRST), ("test_second.py", SECOND)):
        (tmp_path / name).write_text(text)
    run = run_pytest(tmp_path, "tests.suite.leaks")
    assert run.returncode == 1
    assert "3 passed, 1 error" in run.stdout
    assert "ERROR at teardown of test_passes" in run.stdout
    assert "test_first.py leaves behind, for whatever runs next in this process:" in run.stdout
    assert "os.environ['OF_A_TEST'] was None and is '1'" in run.stdout
