"""Which of several failed ranks gives a host its status."""

import json
import os
import sys

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from megasched.launch.torchrun import node
from megasched.launch.torchrun.node import first_failure, last_words
from megasched.trainer import run_failure


def failure(rank, status, timestamp):
    """As torchrun notes it of a process that wrote no error file."""
    found = ProcessFailure(local_rank=rank, pid=100 + rank, exitcode=status, error_file="none")
    found.timestamp = timestamp
    return found


@pytest.mark.parametrize("status", [-9, -11, 2, 17])
def test_a_rank_that_lost_another_is_not_the_first(status):
    """Both had ended when torchrun looked, and it came to the lower one first, maybe in the second before."""
    lost, killed = failure(0, 1, 50), failure(1, status, 51)
    assert first_failure([lost, killed]) is killed


@pytest.mark.parametrize(("status", "timestamp"), [(-15, 50), (-15, 51), (-9, 80)])
def test_a_rank_that_torchrun_has_ended_is_not_the_first(status, timestamp):
    failed, ended = failure(1, 1, 50), failure(0, status, timestamp)
    assert first_failure([ended, failed]) is failed


def test_of_equal_ones_the_first_counts():
    late, early = failure(0, 1, 51), failure(1, 1, 50)
    assert first_failure([late, early]) is early
    late, early = failure(0, -9, 51), failure(1, 2, 50)
    assert first_failure([late, early]) is early


@pytest.mark.parametrize(("printed_last", "err"), [("", "megasched: error: no such file\n"), ("1", "")])
def test_the_last_words_are_those_of_the_rank(tmp_path, monkeypatch, capsys, printed_last, err):
    path = tmp_path / "error.json"
    monkeypatch.setenv(run_failure.PRINTED_LAST, printed_last)
    monkeypatch.setenv(run_failure.ERROR_FILE, str(path))
    monkeypatch.setattr(run_failure, "end", lambda status: None)
    run_failure.end_with_error(run_failure.MegaschedError("no such file"))
    assert capsys.readouterr().err == err
    assert json.loads(path.read_text())["message"]["message"] == "megasched: error: no such file"
    refused, lost = ProcessFailure(0, 100, 2, str(path)), failure(1, 1, 50)
    error = ChildFailedError("megasched", {0: refused, 1: lost})
    assert last_words(refused, error) == "megasched: error: no such file"
    assert last_words(lost, error) == str(error)


def test_a_rank_prints_what_could_not_be_handed_over(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(run_failure.PRINTED_LAST, "1")
    monkeypatch.setenv(run_failure.ERROR_FILE, str(tmp_path / "no such folder" / "error.json"))
    monkeypatch.setattr(run_failure, "end", lambda status: None)
    run_failure.end_with_error(run_failure.MegaschedError("no such file"))
    assert capsys.readouterr().err == "megasched: error: no such file\n"


@pytest.mark.parametrize(("flags", "said"), [([], "1"), (["--tee", "3"], None), (["--redirects", "3"], None)])
def test_ranks_leave_the_last_words_to_the_node_unless_each_has_a_file(monkeypatch, flags, said):
    monkeypatch.setattr(sys, "argv", ["node", *flags, "pretrain_gpt.py"])
    monkeypatch.setattr(node, "run", lambda args: None)
    monkeypatch.setenv(run_failure.PRINTED_LAST, "before")
    monkeypatch.delenv(run_failure.PRINTED_LAST)
    node.main()
    assert os.environ.get(run_failure.PRINTED_LAST) == said
