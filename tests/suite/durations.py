"""What tests may take, what they took when it was last recorded, and what they take now.

``tests/suite/durations.json`` holds, of each file, the seconds of all its tests and of the slowest one. ``make
durations`` writes it anew, on a machine with nothing else to do; the record must keep the budget. Tests that
exceed it now are named before the summary; that fails nobody, as a machine that is busy with other things would.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import pytest

RECORD = Path(__file__).with_name("durations.json")
BUDGET = 60.0  # seconds for a test of `make test`, its fixtures included
# Slurm takes half a minute to miss a node, and to start a job again.
SLURM, SLURM_BUDGET = "tests/slurm", 120.0
# 25 minutes of two processes, for all tests but Slurm's, which run beside them. CI's machine takes more than twice
# as long as the one that the record is made on, and ends after 90 minutes.
TOTAL = 2 * 25 * 60.0
SHOWN = 10


class Entry(NamedTuple):
    """Seconds of a file's tests: of all, and of the slowest."""

    seconds: float
    slowest: float


def budget_of(nodeid: str) -> float:
    return SLURM_BUDGET if nodeid.startswith(SLURM) else BUDGET


def read_record() -> dict[str, Entry]:
    return {file: Entry(*entry) for file, entry in json.loads(RECORD.read_text()).items()}


def write_record(root: Path, entries: dict[str, Entry]) -> None:
    """A line for each file that there still is."""
    lines = [
        f"  {json.dumps(file)}: {json.dumps(entries[file])}" for file in sorted(entries) if (root / file).exists()
    ]
    RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record-durations", action="store_true", help=f"write what the tests take to {RECORD.name}")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # a process of xdist tells the first one
        config.pluginmanager.register(Durations(), "durations")


class Durations:
    """Adds up, test by test."""

    def __init__(self) -> None:
        self.tests: dict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.tests[report.nodeid] += report.duration

    def files(self) -> dict[str, Entry]:
        """The longest first."""
        found: dict[str, list[float]] = defaultdict(list)
        for nodeid, seconds in self.tests.items():
            found[nodeid.partition("::")[0]].append(seconds)
        entries = {file: Entry(round(sum(each), 1), round(max(each), 1)) for file, each in found.items()}
        return dict(sorted(entries.items(), key=lambda entry: -entry[1].seconds))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
        files = self.files()
        if len(files) > 1:
            terminalreporter.section(f"slowest of {len(files)} files", sep="-")
            for file, (seconds, slowest) in list(files.items())[:SHOWN]:
                terminalreporter.write_line(f"{seconds:7.1f} s, slowest test {slowest:5.1f} s  {file}")
        for name, seconds in self.tests.items():
            if seconds > budget_of(name):
                terminalreporter.write_line(f"over the budget of {budget_of(name):g} s: {seconds:.1f} s  {name}")
        if config.getoption("record_durations"):
            write_record(config.rootpath, read_record() | files)
