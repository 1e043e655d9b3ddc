"""How ``megasched tune`` looks: a table that fills, and the winner as a command."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from megasched.tuner.space import Space
from megasched.tuner.study import Trial
from megasched.tuner.tune import Tuning

COLOURS = {"ok": "green", "oom": "magenta", "timeout": "yellow", "refused": "yellow", "crash": "red"}
# Of a table that fills on a screen, so many trials are shown beside the best.
LAST = 15
OnStart = Callable[[dict[str, Any], Tuning], None]
OnEnd = Callable[[Tuning], None]


@contextmanager
def watch(console: Console, space: Space, trials: int) -> Iterator[tuple[OnStart, OnEnd]]:
    """Shows how far the search is; yields what `tune` calls before and after each trial.

    A table on a terminal; elsewhere (a log) a line for each trial.
    """
    if not console.is_terminal:

        def print_line(tuning: Tuning) -> None:
            last = tuning.trials[-1]
            console.print(f"trial {len(tuning.trials)}/{trials}: {_line(last)}", soft_wrap=True, markup=False)

        yield lambda point, tuning: None, print_line
        return

    from rich.live import Live

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
    """The last trials and the best one.

    Args:
        trials: that are made in all.
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


def _row(space: Space, trial: Trial) -> list[str]:
    result = trial.result
    score = f"{result.score:.4g}" if result.score is not None else ""
    why = f": {escape(result.why)}" if result.why else ""
    told = f"[{COLOURS[result.outcome]}]{result.outcome}[/]{why[:60]}"
    return [str(trial.number), *_values(space, trial.point), score, told]


def _values(space: Space, point: dict[str, Any]) -> list[str]:
    return [readable(point[name]) if name in point else "" for name in space.symbols]


def readable(value: Any) -> str:
    """A value as it stands in a table."""
    return {True: "yes", False: "no", None: "-"}[value] if isinstance(value, bool | None) else str(value)


def print_winner(tuning: Tuning, command: Sequence[str], plots: Sequence[str], console: Console) -> None:
    """What was found, as a command to copy.

    Args:
        command: of the best trial, without what made it a trial.
        plots: paths.
    """
    outcomes = [trial.result.outcome for trial in tuning.trials]
    told = ", ".join(f"{outcomes.count(one)} {one}" for one in COLOURS if one in outcomes)
    console.print(
        f"\n{len(outcomes)} trials of {tuning.points} points ({told}); {tuning.ruled_out} more ruled out"
    )
    best = tuning.best
    if best is None:
        console.print("[red]no trial has run to its end[/]; what each said is in its log")
        return
    assert best.result.seconds is not None
    console.print(f"best: trial {best.number}, {_line(best)}, {1000 * best.result.seconds:.1f} ms an iteration")
    console.print(shlex.join(command), markup=False, soft_wrap=True)
    for plot in plots:
        console.print(f"plot: {plot}", markup=False, soft_wrap=True)
