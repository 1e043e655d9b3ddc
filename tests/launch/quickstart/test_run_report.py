"""The quickstart's closing numbers and picture."""

import io

import pytest

from megasched.errors import MegaschedError
from megasched.launch.quickstart.run_report import progress, result_table, save_loss_curve, summarize
from megasched.launch.status.training_log import Iteration, TrainingLog


def log_of(losses, seconds=0.5):
    """A log as Megatron prints it: the second line still holds the first iteration."""
    printed = [Iteration(index + 1, loss, seconds) for index, loss in enumerate(losses)]
    if len(losses) > 1:
        printed[1] = Iteration(2, (losses[0] + losses[1]) / 2, seconds)
    return TrainingLog(printed=printed, validation={20: 2.25, 10: 2.75})


def test_summary_of_a_run():
    losses = [6.0] * 10 + [3.0] * 10 + [2.0] * 10
    summary = summarize(log_of(losses), tokens_per_step=512)
    assert summary.steps == 30
    assert summary.first_loss == 6.0
    assert summary.last_loss == pytest.approx(2.5)
    assert summary.tokens_per_second == pytest.approx(1024.0)
    assert summary.train_seconds == pytest.approx(15.0)
    assert list(summary.validation.items()) == [(10, 2.75), (20, 2.25)]


def test_one_step_has_no_speed():
    assert summarize(log_of([6.0]), tokens_per_step=512).tokens_per_second == 0.0


def test_a_log_without_iterations_is_an_error():
    with pytest.raises(MegaschedError, match="no line of an iteration"):
        summarize(TrainingLog(), tokens_per_step=512)


def test_the_table_says_losses_speed_and_places(tmp_path):
    from rich.console import Console

    console = Console(file=io.StringIO(), width=200)
    summary = summarize(log_of([6.0, 5.0, 4.0]), tokens_per_step=512)
    console.print(result_table(summary, total_seconds=61.4, checkpoints=tmp_path, curve=tmp_path / "l.png"))
    text = console.file.getvalue()
    for said in (
        "6.000 nats",
        "mean of last 3 steps",
        "5.000 nats",
        "iteration 20",
        "2.250 nats",
        "1,024 tokens/s",
    ):
        assert said in text
    assert "2 s training, 61 s in all" in text
    assert str(tmp_path / "l.png") in text


def test_a_narrow_table_says_whole_paths(tmp_path):
    from rich.console import Console

    console = Console(file=io.StringIO(), width=60)
    table = result_table(
        summarize(log_of([6.0]), tokens_per_step=1), total_seconds=1, checkpoints=tmp_path, curve=tmp_path
    )
    console.print(table)
    said = "".join(
        line.split("\u2502")[2].strip() for line in console.file.getvalue().splitlines() if "\u2502" in line
    )
    assert said.count(str(tmp_path)) == 2


def test_the_curve_is_a_png(tmp_path):
    save_loss_curve(log_of([6.0, 5.0, 4.0]), tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG\r\n")


def test_progress_without_a_terminal_is_about_ten_lines():
    from rich.console import Console

    console = Console(file=io.StringIO(), force_terminal=False)
    with progress(console, "starting 4 ranks", 100) as show:
        for number in range(1, 101):
            show(Iteration(number, 3.0, 0.5))
    lines = console.file.getvalue().splitlines()
    assert lines[0] == "starting 4 ranks"
    assert len(lines) == 12
    assert lines[-1] == "iteration 100/100: loss 3.000"


def test_progress_on_a_terminal_shows_the_loss():
    from rich.console import Console

    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    with progress(console, "starting 4 ranks", 2) as show:
        show(Iteration(1, 3.0, 0.5))
        show(Iteration(2, 2.5, 0.5))
    assert "training, loss 2.500" in console.file.getvalue()
