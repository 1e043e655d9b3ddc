"""Runs ``megasched tune``, from the command line to the winning flags."""

from __future__ import annotations

import shlex
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from megasched.cli.output import report_console
from megasched.errors import ConfigError
from megasched.json_output import json_only, print_json
from megasched.launch.watched_run import INTERRUPTED
from megasched.printing.console import plain_console
from megasched.tuner.plots import save_plots
from megasched.tuner.runner import CommandRunner, SlurmRunner, SubprocessRunner, check_command, point_words
from megasched.tuner.space import Space, load_space
from megasched.tuner.study import Search, Trial, Tuning, default_trials
from megasched.tuner.warm_start import read_warm_start

COLOURS = {"ok": "green", "oom": "magenta", "timeout": "yellow", "refused": "yellow", "crash": "red"}
# Of a table that fills on a screen, so many trials are shown beside the best.
LAST = 15
OnStart = Callable[[dict[str, Any], Tuning], None]
OnEnd = Callable[[Tuning], None]


@dataclass(frozen=True)
class Settings:
    """Holds the options of the command, as ``megasched tune --help`` explains them."""

    sampler: str
    trials: int | None
    iterations: int
    timeout: float
    warm_start: Path | None
    slurm: bool
    seed: int
    folder: Path


def tune_command(space_file: Path, command: Sequence[str], settings: Settings, *, as_json: bool) -> int:
    """Searches for the fastest flags, and prints the result.

    Returns:
        0 if there is a winner, 1 if no trial ran to its end, 130 after Ctrl-C.

    Raises:
        ConfigError: an argument can't be used as given.
    """
    with json_only(as_json):
        space = load_space(space_file)
    check_command(space, command)
    _check_program(command[0], slurm=settings.slurm)
    settings.folder.mkdir(parents=True, exist_ok=True)
    console = plain_console(stderr=True) if as_json else report_console()
    with json_only(as_json):
        tuning, interrupted = _search(space, command, settings, console)
    plots = [str(path) for path in save_plots(space, tuning.trials, settings.folder / "plots")]
    best = [] if tuning.best is None else [*command, *point_words(space, tuning.best.point)]
    if settings.slurm and best:
        best = ["sbatch", *best]
    if as_json:
        print_json(to_dict(tuning, best, plots))
    else:
        print_winner(tuning, best, plots, console)
    if interrupted:
        console.print("interrupted; the same command goes on")
        return INTERRUPTED
    return 0 if best else 1


def _check_program(program: str, *, slurm: bool) -> None:
    """Raises ``ConfigError`` if the program does not exist, since each trial would end in the same way."""
    needed = "sbatch" if slurm else program
    if shutil.which(needed) is None:
        raise ConfigError(f"{needed}: no such program; trials run the command that stands after `--`")


def _search(space: Space, command: Sequence[str], settings: Settings, console: Console) -> tuple[Tuning, bool]:
    """Runs the search, and returns its result and whether Ctrl-C ended it."""
    first = read_warm_start(settings.warm_start, space) if settings.warm_start else []
    search = Search(
        space, settings.sampler, seed=settings.seed, first=first, folder=settings.folder, command=command
    )
    trials = settings.trials or default_trials(len(space.points))
    # A scheduler that ends this process shall leave no trial running either.
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with watch(console, space, trials) as (on_start, on_end):
            runner = _runner(command, space, settings)
            return search.run(runner, trials, on_start=on_start, on_end=on_end), False
    except KeyboardInterrupt:
        return search.so_far(), True
    finally:
        signal.signal(signal.SIGTERM, previous)


def _runner(command: Sequence[str], space: Space, settings: Settings) -> CommandRunner:
    kind = SlurmRunner if settings.slurm else SubprocessRunner
    logs = settings.folder / "logs"
    return kind(command, space, logs, timeout=settings.timeout, iterations=settings.iterations)


def to_dict(tuning: Tuning, best: Sequence[str], plots: Sequence[str]) -> dict[str, Any]:
    """Returns what ``--json`` prints; ``command`` is that of the best trial."""
    trials = [{"number": t.number, "point": t.point, **asdict(t.result)} for t in tuning.trials]
    winner = next((trial for trial in trials if tuning.best and trial["number"] == tuning.best.number), None)
    return {
        "points": tuning.points,
        "ruled_out": tuning.ruled_out,
        "best": winner and {**winner, "command": list(best)},
        "trials": trials,
        "plots": list(plots),
    }


@contextmanager
def watch(console: Console, space: Space, trials: int) -> Iterator[tuple[OnStart, OnEnd]]:
    """Shows the progress of the search; yields the functions that `tune` calls before and after each trial.

    On a terminal it shows a table; elsewhere (a log) it prints a line for each trial.
    """
    if not console.is_terminal:

        def print_line(tuning: Tuning) -> None:
            last = tuning.trials[-1]
            console.print(f"trial {last.number} of {trials}: {_line(last)}", soft_wrap=True)

        yield lambda point, tuning: None, print_line
        return

    with Live(console=console, auto_refresh=False) as live:

        def show(point: dict[str, Any], tuning: Tuning) -> None:
            live.update(table(space, tuning, trials, now=point), refresh=True)

        yield show, lambda tuning: live.update(table(space, tuning, trials), refresh=True)


def _line(trial: Trial) -> str:
    result = trial.result
    point = ", ".join(f"{name}={readable(value)}" for name, value in trial.point.items())
    found = f"{result.score:.4g} samples/s" if result.score is not None else f"{result.outcome}: {result.why}"
    return f"{point}  {found}"


def table(space: Space, tuning: Tuning, trials: int, now: dict[str, Any] | None = None) -> Table:
    """Returns a table of the last trials and the best one.

    Args:
        trials: number of all trials to make.
        now: the point that is being tried.
    """
    left = tuning.points - tuning.ruled_out
    title = f"{len(tuning.trials)} of {trials} trials; {tuning.points} points, {left} not ruled out"
    found = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    found.add_column("trial", justify="right")
    for name in space.symbols:
        found.add_column(name, justify="right")
    found.add_column("samples/s", justify="right")
    found.add_column("outcome")
    best = tuning.best
    shown = [trial for trial in tuning.trials[:-LAST] if trial is best] + tuning.trials[-LAST:]
    for trial in shown:
        found.add_row(*_row(space, trial), style="bold" if trial is best else "")
    if now is not None:
        found.add_row("", *_values(space, now), "", "running ...")
    return found


def _row(space: Space, trial: Trial) -> list[str | Text]:
    result = trial.result
    score = f"{result.score:.4g}" if result.score is not None else ""
    why = f": {result.why}" if result.why else ""
    told = Text.assemble((result.outcome, COLOURS[result.outcome]), why[:60])
    return [str(trial.number), *_values(space, trial.point), score, told]


def _values(space: Space, point: dict[str, Any]) -> list[str]:
    return [readable(point[name]) if name in point else "" for name in space.symbols]


def readable(value: Any) -> str:
    """Returns a value as text for a table."""
    return {True: "yes", False: "no", None: "-"}[value] if isinstance(value, bool | None) else str(value)


def print_winner(tuning: Tuning, command: Sequence[str], plots: Sequence[str], console: Console) -> None:
    """Prints the result of the search, with the best command to copy.

    Args:
        command: command of the best trial, without what made it a trial.
        plots: paths of the plots.
    """
    outcomes = [trial.result.outcome for trial in tuning.trials]
    told = ", ".join(f"{outcomes.count(one)} {one}" for one in COLOURS if one in outcomes)
    console.print(
        f"\n{len(outcomes)} trials of {tuning.points} points ({told}); {tuning.ruled_out} more ruled out"
    )
    best = tuning.best
    if best is None:
        console.print(Text.assemble(("no trial has run to its end", "red"), "; what each said is in its log"))
        return
    assert best.result.seconds is not None
    each = f"{1000 * best.result.seconds:.1f} ms an iteration"
    console.print(f"best: trial {best.number}, {_line(best)}, {each}")
    console.print(shlex.join(command), soft_wrap=True)
    for plot in plots:
        console.print(f"plot: {plot}", soft_wrap=True)
