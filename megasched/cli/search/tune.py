"""``megasched tune``: from the command line to the winning flags."""

from __future__ import annotations

import importlib.util
import shutil
import signal
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megasched.errors import ConfigError
from megasched.json_output import json_only, print_json
from megasched.launch.watched_run import INTERRUPTED

if TYPE_CHECKING:
    from rich.console import Console

    from megasched.tuner.runner import CommandRunner
    from megasched.tuner.space import Space
    from megasched.tuner.tune import Tuning


@dataclass(frozen=True)
class Settings:
    """Options of the command, as ``megasched tune --help`` explains them."""

    sampler: str
    trials: int | None
    iterations: int
    timeout: float
    warm_start: Path | None
    slurm: bool
    seed: int
    folder: Path


def tune_command(space_file: Path, command: Sequence[str], settings: Settings, *, as_json: bool) -> int:
    """Searches, and prints what was found.

    Returns:
        0 if there is a winner, 1 if no trial ran to its end, 130 after Ctrl-C.

    Raises:
        ConfigError: whatever can't be used as given.
    """
    missing = [name for name in ("optuna", "sqlalchemy", "matplotlib") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"{', '.join(missing)} is missing: pip install 'megasched[tune]'")
    from rich.console import Console

    from megasched.cli.console import report_console
    from megasched.cli.search.tune_view import print_winner
    from megasched.tuner.command_line import check_command, point_words
    from megasched.tuner.plots import save_plots
    from megasched.tuner.space_file import load_space

    with json_only(as_json):
        space = load_space(space_file)
    check_command(space, command)
    _check_program(command[0], slurm=settings.slurm)
    settings.folder.mkdir(parents=True, exist_ok=True)
    console = Console(stderr=True, highlight=False) if as_json else report_console()
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
    """A program that is not there would end each trial in the same way."""
    needed = "sbatch" if slurm else program
    if shutil.which(needed) is None:
        raise ConfigError(f"{needed}: no such program; trials run the command that stands after `--`")


def _search(space: Space, command: Sequence[str], settings: Settings, console: Console) -> tuple[Tuning, bool]:
    """What was found, and whether Ctrl-C ended it."""
    from megasched.cli.search.tune_view import watch
    from megasched.tuner.encoding import Encoding
    from megasched.tuner.samplers import SAMPLERS
    from megasched.tuner.study import open_study
    from megasched.tuner.tune import default_trials, tune, tuning_so_far
    from megasched.tuner.warm_start import read_warm_start

    if settings.sampler not in SAMPLERS:
        raise ConfigError(f"--sampler {settings.sampler}: there are {', '.join(SAMPLERS)}")
    first = read_warm_start(settings.warm_start, space) if settings.warm_start else []
    sampler = SAMPLERS[settings.sampler](Encoding(space), seed=settings.seed, first=first)
    study = open_study(settings.folder, space, command, sampler)
    trials = settings.trials or default_trials(len(space.points))
    # A scheduler that ends this process shall leave no trial running either.
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with watch(console, space, trials) as (on_start, on_end):
            runner = _runner(command, space, settings)
            return tune(study, space, sampler, runner, trials, on_start=on_start, on_end=on_end), False
    except KeyboardInterrupt:
        return tuning_so_far(study, space, sampler), True
    finally:
        signal.signal(signal.SIGTERM, previous)


def _runner(command: Sequence[str], space: Space, settings: Settings) -> CommandRunner:
    from megasched.tuner.runner import SubprocessRunner
    from megasched.tuner.slurm import SlurmRunner

    kind = SlurmRunner if settings.slurm else SubprocessRunner
    logs = settings.folder / "logs"
    return kind(command, space, logs, timeout=settings.timeout, iterations=settings.iterations)


def to_dict(tuning: Tuning, best: Sequence[str], plots: Sequence[str]) -> dict[str, Any]:
    """What ``--json`` prints; ``command`` is the winner's."""
    trials = [{"number": t.number, "point": t.point, **asdict(t.result)} for t in tuning.trials]
    winner = next((trial for trial in trials if tuning.best and trial["number"] == tuning.best.number), None)
    return {
        "points": tuning.points,
        "ruled_out": tuning.ruled_out,
        "best": winner and {**winner, "command": list(best)},
        "trials": trials,
        "plots": list(plots),
    }
