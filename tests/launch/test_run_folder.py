"""Where a run keeps its files, and which logs it has left."""

import os
from pathlib import Path

import pytest

from megasched.errors import ConfigError
from megasched.launch.run_folder import Attempt, RunFolder, find_logs


def write(path, modified):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("x\n")
    os.utime(path, (modified, modified))
    return path


def test_names():
    run = RunFolder(Path("runs/llama"))
    assert run.script == Path("runs/llama/job.sbatch")
    assert run.host_script == Path("runs/llama/job.sh")
    assert run.description == Path("runs/llama/job.json")
    assert run.batch_log("12") == Path("runs/llama/logs/12.log")
    assert run.attempt_folder("12", 1) == Path("runs/llama/logs/12-1")
    assert run.node_log("12", 1, 3) == Path("runs/llama/logs/12-1/node-3.log")


def test_what_the_launcher_knew(tmp_path):
    run = RunFolder(tmp_path)
    assert run.described() == {}
    run.describe({"jobs": ["7"]})
    assert run.described() == {"jobs": ["7"]}
    run.description.write_text("{")
    with pytest.raises(
        ConfigError, match=r"job\.json: line 1, column 2: it is no JSON: .*status works without the file"
    ):
        run.described()


def test_each_attempt_has_a_number_of_its_own(tmp_path):
    run = RunFolder(tmp_path)
    for other in ("local-x", "my-local-7", "12-3", "local-10"):
        run.logs.joinpath(other).mkdir(parents=True)
    assert [run.begin_attempt("local"), run.begin_attempt("local"), run.begin_attempt("x*")] == [11, 12, 0]
    assert run.attempt_folder("local", 12).is_dir()


def test_attempts_come_in_the_order_of_their_last_lines(tmp_path):
    run = RunFolder(tmp_path)
    # Job 9 came after job 12 here.
    for name, restart, modified in (("9", 0, 500), ("12", 10, 400), ("12", 2, 300), ("my-run", 0, 200)):
        write(run.node_log(name, restart, 0), modified)
    assert [(each.name, each.restart) for each in run.attempts()] == [
        ("my-run", 0),
        ("12", 2),
        ("12", 10),
        ("9", 0),
    ]


def test_copies_that_have_lost_their_times_are_in_the_order_of_their_names(tmp_path):
    run = RunFolder(tmp_path)
    for name, restart in (("12", 10), ("9", 1), ("12", 2), ("9", 0)):
        write(run.node_log(name, restart, 0), 100)
    assert [(each.name, each.restart) for each in run.attempts()] == [("9", 0), ("9", 1), ("12", 2), ("12", 10)]


def test_the_logs_of_nodes_are_in_order_and_other_files_are_passed_over(tmp_path):
    run = RunFolder(tmp_path)
    for node in (10, 2, 0):
        write(run.node_log("12", 0, node), 100)
    write(run.attempt_folder("12", 0) / "node-0.log.gz", 900)
    write(run.logs / "old-things" / "notes.txt", 900)
    logs = tuple(run.node_log("12", 0, node) for node in (0, 2, 10))
    assert run.attempts() == [Attempt("12", 0, logs)]


def test_all_logs_of_a_run(tmp_path):
    run = RunFolder(tmp_path)
    second = write(run.node_log("12", 1, 0), 200)
    first = write(run.node_log("12", 0, 0), 100)
    batch = write(run.batch_log("12"), 300)
    found = find_logs(tmp_path)
    assert found.batch_logs == (batch,)
    assert found.paths == [batch, first, second]


def test_batch_logs_alone_are_attempts(tmp_path):
    run = RunFolder(tmp_path)
    new, old = write(run.batch_log("12"), 300), write(run.batch_log("13"), 200)
    found = find_logs(tmp_path)
    assert [attempt.logs for attempt in found.attempts] == [(old,), (new,)]
    assert found.batch_logs == ()


def test_another_folder_and_a_log(tmp_path):
    new, old = write(tmp_path / "slurm-7.out", 300), write(tmp_path / "train.log", 200)
    write(tmp_path / "train.sh", 400)
    assert find_logs(tmp_path).attempts == (Attempt("slurm-7", 0, (old, new)),)
    assert find_logs(old).attempts == (Attempt("train", 0, (old,)),)


def test_no_logs(tmp_path):
    with pytest.raises(ConfigError, match=r"there are no logs .* `megasched status JOBID`"):
        find_logs(tmp_path)
    with pytest.raises(ConfigError, match="absent: no such file or folder; name a run's folder"):
        find_logs(tmp_path / "absent")
