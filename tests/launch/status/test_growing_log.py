"""Logs that are read on from where the last look ended."""

from pathlib import Path

import pytest

from megasched.launch.status import growing_log
from megasched.launch.status.growing_log import GrowingLog
from tests.launch.status.test_training_log import line


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "node-0.log"
    path.write_text("")
    return GrowingLog(path)


def append(log, text):
    with log.path.open("a") as file:
        file.write(text)
    log.refresh()


def test_each_look_reads_what_has_come(log):
    append(log, "hello\n" + line(1, 900.0, 5.0))
    assert [step.iteration for step in log.training.printed] == [1]
    append(log, "RuntimeError: no\n" + line(2, 900.0, 4.0) + line(3, 900.0, 3.0))
    assert [step.iteration for step in log.training.printed] == [1, 2, 3]


def test_half_a_line_waits_for_its_other_half(log):
    whole = line(1, 900.0, 5.0)
    append(log, whole[:100])
    assert log.training.printed == []
    append(log, whole[100:-1])
    assert log.training.printed == []
    append(log, "\n")
    assert [step.iteration for step in log.training.printed] == [1]


@pytest.mark.parametrize("block", [1, 7, 300, 1000])
def test_blocks_of_any_size_give_the_same(log, block, monkeypatch):
    monkeypatch.setattr(growing_log, "BLOCK_BYTES", block)
    append(log, "".join(f"noise {i}\n\n{line(i, 900.0, 5.0)}" for i in range(1, 20)) + "KeyError: 'x'\nhalf")
    assert [step.iteration for step in log.training.printed] == list(range(1, 20))
    assert log.failure.exception == "KeyError: 'x'"


def test_a_log_that_was_replaced_is_read_anew(log):
    append(log, line(1, 900.0, 5.0) + line(2, 900.0, 4.0))
    log.path.write_text(line(7, 900.0, 3.0))
    log.refresh()
    assert [step.iteration for step in log.training.printed] == [7]
    other = log.path.with_suffix(".new")
    other.write_text(line(8, 900.0, 3.0) + line(9, 900.0, 2.0))
    other.rename(log.path)
    log.refresh()
    assert [step.iteration for step in log.training.printed] == [8, 9]


def test_an_error_is_over_when_training_goes_on(log):
    append(log, line(1, 900.0, 5.0) + "ValueError: first\nValueError: second\n")
    assert log.failure.exception == "ValueError: first"
    append(log, "[before the start of training step] datetime: 2026-11-20 10:00:05.000000 \n")
    assert log.failure.exception == ""
    append(log, "ValueError: third\n")
    append(log, line(2, 900.0, 5.0))
    assert log.failure.exception == ""


def test_a_log_that_has_not_grown_is_not_opened(log, monkeypatch):
    append(log, line(1, 900.0, 5.0))
    monkeypatch.setattr(Path, "open", lambda *given: 1 / 0)
    log.refresh()
    assert len(log.training.printed) == 1


def test_errors_are_looked_for_at_the_end_of_a_long_log(log, monkeypatch):
    monkeypatch.setattr(growing_log, "FAILURE_BYTES", 1000)
    monkeypatch.setattr(growing_log, "BLOCK_BYTES", 100)
    append(log, line(1, 900.0, 5.0) + "ValueError: long ago\n" + "noise\n" * 500 + "ValueError: at the end\n")
    assert log.failure.exception == "ValueError: at the end"
    assert len(log.training.printed) == 1


def test_bytes_that_are_no_text(log):
    log.path.write_bytes(b"\xff\xfe error:\n" + line(1, 900.0, 5.0).encode())
    log.refresh()
    assert len(log.training.printed) == 1
