"""The command ``megasched tune``, on a stand-in for the trainer."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from megasched.cli import main
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
    assert "trial 5/11: " in out
    assert "trial 4/11: " not in out
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
        (["--sampler", "random"], None, "--sampler random: there are model, tpe, grid"),
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
