"""The record of what tests take, which is what they are handed out by."""

import re
from pathlib import Path

from tests.suite.durations import SLURM, TOTAL, Durations, Entry, budget_of, read_record

TESTS = Path(__file__).parents[1]
LEFT_OUT = re.compile(r"^pytestmark = pytest\.mark\.(slow|browser|checkout)\b", re.MULTILINE)


def test_the_record_is_of_the_files_that_there_are():
    """`make durations` writes it anew."""
    files = [path for path in TESTS.rglob("test_*.py") if not LEFT_OUT.search(path.read_text())]
    assert sorted(read_record()) == sorted(str(path.relative_to(TESTS.parent)) for path in files)


def test_no_test_takes_longer_than_it_may():
    over = {file: entry.slowest for file, entry in read_record().items() if entry.slowest > budget_of(file)}
    assert not over


def test_all_together_take_no_longer_than_they_may():
    assert sum(entry.seconds for file, entry in read_record().items() if not file.startswith(SLURM)) < TOTAL


def test_files_are_added_up_and_sorted():
    found = Durations()
    found.tests.update({"a.py::x": 1.0, "a.py::y[b::c]": 2.5, "b.py::x": 4.0})
    assert found.files() == {"b.py": Entry(4.0, 4.0), "a.py": Entry(3.5, 2.5)}
    assert list(found.files()) == ["b.py", "a.py"]


def test_slurm_may_take_longer():
    assert budget_of("tests/slurm/test_nights.py::test_undisturbed[short]") == 120
    assert budget_of("tests/cli/test_main.py::test_version") == 60
