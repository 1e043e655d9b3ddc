"""Which process of xdist gets which file."""

from types import SimpleNamespace

import pytest

from tests.suite import lanes
from tests.suite.durations import Entry

RANKS, PURE = ("tests/parity/test_matrix.py", "tests/verify/test_verify.py"), ("tests/test_errors.py", lanes.SLURM)


class Process:
    """A process of xdist, and what it was given."""

    def __init__(self, number, tests):
        self.gateway = SimpleNamespace(id=f"gw{number}")
        self.tests, self.given, self.shutting_down = tests, [], False

    def send_runtest_some(self, indices):
        self.given += [self.tests[index] for index in indices]

    def shutdown(self):
        self.shutting_down = True


@pytest.fixture
def run(pytestconfig):
    """Hands out all tests; the tests that each process ran."""

    def run(tests, count):
        config = SimpleNamespace(option=pytestconfig.option, getvalue=lambda name: [f"{count}*popen"])
        scheduler = lanes.Lanes(config)
        processes = [Process(number, tests) for number in range(count)]
        for process in processes:
            scheduler.add_node(process)
            scheduler.add_node_collection(process, tests)
        scheduler.schedule()
        done = dict.fromkeys(processes, 0)
        while any(done[process] < len(process.given) for process in processes):
            for process in processes:
                if done[process] < len(process.given):
                    scheduler.mark_test_complete(process, tests.index(process.given[done[process]]))
                    done[process] += 1
        assert scheduler.tests_finished
        assert all(process.shutting_down for process in processes)
        return [process.given for process in processes]

    return run


def four_of(*files):
    return [f"{file}::test_{number}" for file in files for number in range(4)]


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_all_tests_run_once_and_each_process_begins_with_its_own_kind(run, count):
    tests = four_of(*RANKS, *PURE)
    given = run(tests, count)
    assert sorted(test for each in given for test in each) == sorted(tests)
    assert given[0][0].startswith(RANKS)
    assert not any(each[0].startswith(RANKS) for each in given[1:2])


@pytest.mark.parametrize("count", [3, 5])
def test_of_three_processes_the_last_one_has_slurm_alone(run, count):
    given = run(four_of(*RANKS, *PURE, "tests/cli/test_main.py", "tests/weights/test_traced_functions.py"), count)
    slurm = four_of(lanes.SLURM)
    assert given[-1] == slurm
    assert not {test for each in given[:-1] for test in each}.intersection(slurm)


def test_without_slurm_the_last_of_three_has_nothing(run):
    tests = four_of(*RANKS, "tests/cli/test_main.py")
    *_, last = given = run(tests, 3)
    assert last == []
    assert sorted(test for each in given for test in each) == sorted(tests)


@pytest.mark.parametrize("files", [RANKS, PURE])
def test_one_kind_alone(run, files):
    tests = four_of(*files)
    assert sorted(test for each in run(tests, 2) for test in each) == sorted(tests)


@pytest.mark.parametrize("helper", [0, 1])
def test_who_has_nothing_left_helps(run, helper):
    kinds = {
        0: [
            RANKS[0],
            *(f"tests/test_{name}.py" for name in ("collector", "errors", "records", "registry", "schedule")),
        ],
        1: [PURE[0], *(f"tests/parity/test_{name}.py" for name in ("bf16", "levels", "lora", "matrix", "save"))],
    }
    files = kinds[helper]
    given = run(four_of(*files), 2)
    assert given[helper][0].startswith(files[0])
    assert {test.partition("::")[0] for test in given[helper]} - {files[0]}


def test_files_are_known_by_what_their_tests_ask_for():
    assert all(lanes.starts_ranks(file) for file in RANKS)
    assert not any(lanes.starts_ranks(file) for file in PURE)


def test_the_longest_come_first_and_new_ones_before_them(monkeypatch):
    record = {"tests/a.py": Entry(1, 1), "tests/b.py": Entry(3, 1), "tests/slurm/c.py": Entry(1, 1)}
    monkeypatch.setattr(lanes, "read_record", lambda: record | {"tests/slurm/d.py": Entry(1, 1)})
    names = ["a.py::x", "a.py::y", "slurm/c.py::x", "b.py::x", "new.py::x", "slurm/d.py::x"]
    items = [SimpleNamespace(nodeid=f"tests/{name}") for name in names]
    lanes.pytest_collection_modifyitems(items)
    found = [item.nodeid.removeprefix("tests/") for item in items]
    assert found == ["new.py::x", "b.py::x", "slurm/c.py::x", "slurm/d.py::x", "a.py::x", "a.py::y"]
