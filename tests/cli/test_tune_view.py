"""The table of ``megasched tune``."""

import io

import pytest
from rich.console import Console

from megasched.cli.search.tune import print_winner, table, watch
from megasched.tuner.outcome import Result
from megasched.tuner.space import Space
from megasched.tuner.study import Trial, Tuning


@pytest.fixture
def space():
    space = Space()
    pp = space.choice("pp", [1, 2])
    space.choice("vp", [2], when=pp > 1)
    space.choice("sp", [False, True])
    return space


def trials(count):
    found = [Trial(0, {"pp": 2, "vp": 2, "sp": True}, Result("ok", 99.0, 0.125))]
    return found + [
        Trial(i, {"pp": 1, "sp": False}, Result("oom", why="CUDA out of memory [64 GiB]")) for i in range(1, count)
    ]


def printed(show, *, terminal=False):
    console = Console(file=io.StringIO(), width=110, force_terminal=terminal, color_system=None)
    show(console)
    return console.file.getvalue()


def test_the_table_shows_the_last_trials_and_the_best_one(space):
    tuning = Tuning(40, trials(30), ruled_out=10)
    text = printed(lambda console: console.print(table(space, tuning, 50, now={"pp": 2, "vp": 2, "sp": False})))
    lines = [line.split() for line in text.splitlines()]
    assert text.startswith("30 of 50 trials; 40 points, 30 not ruled out")
    assert lines[2] == ["0", "2", "2", "yes", "99", "ok"]
    assert [line[0] for line in lines[3:-1]] == [str(number) for number in range(15, 30)]
    assert lines[3][:4] == ["15", "1", "no", "oom:"]
    assert "CUDA out of memory [64 GiB]" in text
    assert lines[-1] == ["2", "2", "no", "running", "..."]


def test_a_log_gets_a_line_for_each_trial(space):
    def show(console):
        with watch(console, space, 9) as (on_start, on_end):
            on_start({"pp": 1}, Tuning(3))
            on_end(Tuning(3, trials(2)))

    assert printed(show) == "trial 2/9: pp=1, sp=no  oom: CUDA out of memory [64 GiB]\n"


def test_a_terminal_gets_the_table_again_and_again(space):
    def show(console):
        with watch(console, space, 9) as (on_start, on_end):
            on_start({"pp": 1, "sp": True}, Tuning(3))
            on_end(Tuning(3, trials(1)))

    text = printed(show, terminal=True)
    assert "running ..." in text
    assert "1 of 9 trials" in text


def test_the_winner_is_a_command(space):
    text = printed(lambda c: print_winner(Tuning(40, trials(3), 10), ["torchrun", "a b", "--x"], ["p.png"], c))
    assert "3 trials of 40 points (1 ok, 2 oom); 10 more ruled out" in text
    assert "best: trial 0, pp=2, vp=2, sp=yes  99 samples/s, 125.0 ms an iteration\n" in text
    assert "\ntorchrun 'a b' --x\nplot: p.png\n" in text
    nothing = printed(lambda c: print_winner(Tuning(40, trials(3)[1:]), [], [], c))
    assert "no trial has run to its end" in nothing
