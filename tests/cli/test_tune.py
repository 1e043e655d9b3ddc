"""The command ``megasched tune``, on a stand-in for the trainer."""

import io
import json
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from megasched.cli import main
from megasched.cli.search.tune import print_winner, table, watch
from megasched.tuner.outcome import Result
from megasched.tuner.space import Space
from megasched.tuner.study import Trial, Tuning
from tests.tuner.trainer import milliseconds
from tests.waiting import until

TRAINER = str(Path(__file__).parents[1] / "tuner" / "trainer.py")
SPACE = """
def space(space):
    batch = space.choice("micro_batch_size", [1, 2, 3, 4, 8, 16], memory="grows")
    layers = space.integer("layers", 0, 3, flag="--recompute-num-layers", memory="shrinks")
    space.where(batch * layers <= 24)
"""


@pytest.fixture
def run(capsys, tmp_path, monkeypatch):
    """Runs a search in this process: exit status, stdout, stderr."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "myspace.py").write_text(SPACE)

    def run(*options, command=(sys.executable, TRAINER)):
        with pytest.raises(SystemExit) as stop:
            main.main(["tune", "myspace.py", *options, "--", *command])
        captured = capsys.readouterr()
        return stop.value.code or 0, captured.out, captured.err

    return run


def test_a_search_finds_the_fastest_flags_and_goes_on(run, tmp_path):
    status, out, err = run("--trials", "4", "--json")
    assert status == 0
    found = json.loads(out)
    assert found["points"] == 22
    assert len(found["trials"]) == 4
    assert err.count("trial ") == 4
    status, out, _ = run("--trials", "11")
    assert status == 0
    assert "trial 4 of 11: " in out
    assert "trial 3 of 11: " not in out
    # The most samples a second of what fits in memory: 8 sequences, 2 or 3 layers recomputed.
    best = f"{8 / milliseconds(8, 2) * 1000:.4g} samples/s, {milliseconds(8, 2):.1f} ms an iteration"
    assert f"micro_batch_size=8, layers=2  {best}" in out
    assert f"{sys.executable} {TRAINER} --micro-batch-size 8 --recompute-num-layers 2\n" in out
    assert {path.name for path in (tmp_path / "tune" / "plots").iterdir()} == {
        *("heatmap.png", "history.png", "parallel.png"),
    }
    assert len(list((tmp_path / "tune" / "logs").iterdir())) == 11


def test_layouts_of_a_planner_come_first(run, tmp_path):
    (tmp_path / "plan.json").write_text(json.dumps({"layouts": [{"flags": {"micro_batch_size": 8, "layers": 2}}]}))
    _, out, _ = run("--trials", "1", "--warm-start", "plan.json", "--json")
    assert json.loads(out)["best"]["point"] == {"micro_batch_size": 8, "layers": 2}


def test_ctrl_c_ends_the_trial_and_leaves_nothing_behind(run, tmp_path):
    words = [sys.executable, "-m", "megasched", "tune", "myspace.py", "--trials", "2", "--sampler", "grid"]
    hanging = [*words, "--", sys.executable, TRAINER, "--hang"]
    process = subprocess.Popen(hanging, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    log = tmp_path / "tune" / "logs" / "trial-0.log"
    until(lambda: process.poll() is not None or (log.exists() and "hanging" in log.read_text()))
    assert process.poll() is None, process.stdout.read()
    started = psutil.Process(process.pid).children(recursive=True)
    assert any(TRAINER in one.cmdline() for one in started)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate()
    assert process.returncode == 130
    assert "no trial has run to its end" in out
    assert "interrupted; the same command goes on" in out
    assert not any(one.is_running() for one in started)


@pytest.mark.parametrize(
    ("options", "command", "message"),
    [
        (["--sampler", "random"], None, "sampler random: there are model, tpe, grid"),
        ([], ["no-such-program"], "no-such-program: no such program"),
        ([], [sys.executable, "--save", "x"], "--save: trials end after a few iterations"),
        (["--warm-start", "none.json"], None, "--warm-start none.json: No such file"),
        (["--slurm"], None, "sbatch: no such program"),
    ],
)
def test_what_can_not_be_used_is_one_message(run, options, command, message, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    status, _, err = run(*options, command=command or [sys.executable, TRAINER])
    assert status == 1
    assert err.startswith("megasched: error: ")
    assert message in err


def test_a_command_that_never_works_is_told_after_three_trials(run):
    status, _, err = run(command=[sys.executable, TRAINER, "--unknown-flag"])
    assert status == 1
    assert "the first 3 trials all failed" in err
    assert err.count("refused: unrecognized arguments: --unknown-flag") == 3


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
    console = Console(file=io.StringIO(), width=110, force_terminal=terminal, color_system=None, markup=False)
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

    assert printed(show) == "trial 1 of 9: pp=1, sp=no  oom: CUDA out of memory [64 GiB]\n"


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
    named = Trial(0, {"pp": "[a|b]"}, Result("ok", 99.0, 0.125))
    assert "best: trial 0, pp=[a|b]  99" in printed(lambda c: print_winner(Tuning(4, [named]), ["x"], [], c))
    assert "[a|b]" in printed(lambda c: c.print(table(space, Tuning(4, [named]), 4, now={"pp": "[c]"})))
    nothing = printed(lambda c: print_winner(Tuning(40, trials(3)[1:]), [], [], c))
    assert "no trial has run to its end" in nothing
