"""The quickstart's main, with the training itself replaced by a few lines of output."""

import re
import shlex
import sys

import pytest

from megasched.launch.quickstart import command as quickstart
from megasched.launch.quickstart import run_plan
from megasched.launch.quickstart.corpus import Corpus
from megasched.printing.shell_command import python, shell_command
from tests.launch.status.test_training_log import line

OUTPUT = line(1, 900.0, 5.6) + line(2, 700.0, 5.5) + line(3, 500.0, 5.2)


@pytest.fixture(autouse=True)
def quick(monkeypatch, tmp_path):
    """A corpus without tokenizing, and a plan that asks for no GPU."""
    corpus = Corpus(folder=tmp_path / "corpus", documents=3, tokens=1000)
    monkeypatch.setattr(quickstart, "prepare_corpus", lambda folder: corpus)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)


def train_by(monkeypatch, code):
    monkeypatch.setattr(run_plan, "training_command", lambda plan, **kwargs: [sys.executable, "-c", code])


@pytest.mark.parametrize("flags", [[], ["--allow-unverified"]])
def test_a_newer_version_has_the_door_of_any_run(tmp_path, capsys, flags):
    assert quickstart.main(["--dir", str(tmp_path / "q"), "--dry-run", *flags]) == 0
    assert ("--allow-unverified" in capsys.readouterr().out) is bool(flags)


def test_dry_run_prints_the_command_and_trains_nothing(tmp_path, capsys):
    assert quickstart.main(["--dir", str(tmp_path / "q"), "--dry-run", "--iters", "7"]) == 0
    words = shlex.split(capsys.readouterr().out.split("exec ")[1].replace("\\\n", " "))
    assert words[words.index("--train-iters") + 1] == "7"
    assert words[words.index("-m", 2) :][:2] == ["-m", "megasched"]
    assert not (tmp_path / "q" / "run-1").exists()


def test_a_run_ends_with_table_curve_and_next_commands(tmp_path, capsys, monkeypatch):
    """With paths as whoever typed the command would write them."""
    train_by(monkeypatch, f"print({OUTPUT!r})")
    monkeypatch.chdir(tmp_path)
    assert quickstart.main(["--dir", "q"]) == 0
    out = capsys.readouterr().out
    run = "q/run-1"
    assert "5.600 nats per byte" in out
    assert re.search(r"loss curve +│ q/run-1/loss.png ", out)
    assert f"bash {run}/train.sh --load {run}/checkpoints --train-iters" in out
    assert shell_command("show", "--model-schedule") in out
    assert shell_command("export", "--load", f"{run}/checkpoints", "--output", f"{run}/hf") in out
    assert (
        f"""{python()} -c 'from transformers import pipeline; print(pipeline("text-generation", "{run}/hf")"""
        in out
    )
    assert f"{shell_command('launch', 'torchrun')} --gpus-per-node N -- pretrain_gpt.py" in out
    assert (tmp_path / run / "loss.png").stat().st_size > 1000
    assert (tmp_path / run / "train.log").read_text().startswith(OUTPUT)


@pytest.mark.parametrize("code", [f"print({OUTPUT!r})", "raise SystemExit(7)"])
def test_a_folder_is_told_as_it_is_called(tmp_path, capsys, monkeypatch, code):
    """rich would take ``[x]`` for a style, ``[/b]`` for an error and ``:fire:`` for a picture."""
    train_by(monkeypatch, code)
    monkeypatch.chdir(tmp_path)
    assert quickstart.main(["--dir", "a [x] :fire: b[/b]"]) == (7 if "raise" in code else 0)
    lines = capsys.readouterr().out.splitlines()
    named = [line for line in lines if "/model/config.json" in line or "run-1/" in line]
    assert len(named) > 1
    assert all("a [x] :fire: b[/b]" in line for line in named)


def test_runs_do_not_overwrite_each_other(tmp_path, monkeypatch):
    train_by(monkeypatch, f"print({OUTPUT!r})")
    for _ in range(2):
        quickstart.main(["--dir", str(tmp_path / "q")])
    assert {path.name for path in (tmp_path / "q").iterdir()} == {"model", "run-1", "run-2"}


def test_a_failure_shows_the_tail_and_passes_the_exit_code_on(tmp_path, capsys, monkeypatch):
    train_by(monkeypatch, "import sys; print('[rank2] out of [memory]'); sys.exit(7)")
    assert quickstart.main(["--dir", str(tmp_path / "q")]) == 7
    out = capsys.readouterr().out
    assert "[rank2] out of [memory]" in out
    assert "exit code 7" in out
    assert str(tmp_path / "q" / "run-1" / "train.log") in out


@pytest.mark.parametrize("iters", ["0", "-3"])
def test_no_steps_are_refused(iters, capsys):
    with pytest.raises(SystemExit, match="2"):
        quickstart.main(["--iters", iters])
    assert "is less than 1" in capsys.readouterr().err
