"""Prints for ``megasched status`` how a run is doing: one screen, live or once, or a line for each change."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Annotated

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from megasched.cli.options import Json
from megasched.cli.output import report_console
from megasched.json_output import print_json
from megasched.launch.slurm.client import SlurmJob
from megasched.launch.status.run_status import RunReader, RunStatus
from megasched.launch.status.training_log import RankTimes
from megasched.slurm import RUNNING

COLOURS = {
    "waiting": "yellow",
    "starting": "cyan",
    "training": "green",
    "hung": "bold red",
    "stopped": "yellow",
    "failed": "bold red",
    "finished": "bold green",
}
BARS = "▁▂▃▄▅▆▇█"
PROGRESS_WIDTH = 30
# As long as an error may be on one screen.
ERROR_CHARACTERS = 400


def status(
    target: Annotated[
        str, typer.Argument(metavar="JOBID|DIR", help="A Slurm job, the folder of a run, or one of its logs.")
    ],
    watch: Annotated[bool, typer.Option("--watch", help="Look again and again until the run has ended.")] = False,
    interval: Annotated[float, typer.Option(min=0.1, metavar="SECONDS", help="Between two looks.")] = 5.0,
    as_json: Json = False,
) -> None:
    """Print how a run is doing, by its logs and by Slurm.

    It needs no GPU, and reads nothing but the logs.
    """
    if watch and as_json:
        raise typer.BadParameter("--json prints one object, and --watch prints again and again: pass one of them")
    reader = RunReader(target)
    if as_json:
        print_json(reader.look().to_dict())
        return
    if not watch:
        print_status(reader.look(), report_console())
        return
    try:
        watch_run(reader.look, report_console(), interval)
    except KeyboardInterrupt:
        return  # it was asked to go on until then


def screen(found: RunStatus, now: datetime) -> RenderableType:
    """Returns everything that is known of a run as one screen.

    Args:
        found: the status of the run.
        now: the current time, for texts like "2 min ago".
    """
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="dim", no_wrap=True)
    rows.add_column(overflow="fold")
    if found.slurm:
        rows.add_row("Slurm", Text(_job(found.slurm)))
    if found.iteration:
        rows.add_row("iteration", _progress(found))
        rows.add_row("loss", _losses(found))
        if found.trend:
            rows.add_row("", _trend([loss for _, loss in found.trend]))
        if found.grad_norm is not None:
            rows.add_row("gradient norm", f"{found.grad_norm:.3f}")
        if found.seconds:
            rows.add_row("speed", _speed(found))
        if found.rank_times:
            rows.add_row("ranks", _ranks(found.rank_times))
        colour = "yellow" if found.skipped or found.nan else ""
        rows.add_row("skipped", Text(f"{found.skipped} iterations, {found.nan} with a loss of NaN", style=colour))
    if found.iteration or found.restarts:
        rows.add_row("restarts", str(found.restarts))
        rows.add_row("checkpoint", Text(_checkpoint(found, now)))
    if found.seconds_left is not None and found.time:
        rows.add_row("to finish", _finish(found, now))
    if found.time:
        rows.add_row("newest line", f"{_clock(found.time, now)}, {_ago(found.time, now)}")
    if found.error:
        error = Text(found.error[:ERROR_CHARACTERS], style="red")
        rows.add_row("error", Group(error, Text(f"in {found.error_log}", style="dim")))
    return Group(_title(found), rows)


def summary(found: RunStatus, now: datetime) -> str:
    """Returns the status of a run as one line for a log."""
    told = [f"{now:%Y-%m-%d %H:%M:%S}  {_state(found.state)}"]
    if found.iteration:
        told.append(f"iteration {found.iteration} of {found.last}")
        told.append(f"loss {_loss(found.loss)}")
    if found.tokens_per_second:
        told.append(f"{found.tokens_per_second:,.0f} tokens/s")
    if found.saved:
        told.append(f"checkpoint {found.saved.iteration}")
    told += [part for part in (found.why, found.error[:ERROR_CHARACTERS]) if part]
    return ", ".join(told)


def print_status(found: RunStatus, console: Console, now: datetime | None = None) -> None:
    """Prints one screen about a run."""
    console.print(screen(found, now or datetime.now()))


def watch_run(look: Callable[[], RunStatus], console: Console, interval: float) -> None:
    """Shows a run again and again until it has ended.

    On a terminal the screen is redrawn; elsewhere a line is printed when something has changed.

    Args:
        look: returns the run's current status.
        console: where the status is shown.
        interval: seconds between two looks.
    """
    if not console.is_terminal:
        before = ""
        while True:
            found, now = look(), datetime.now()
            line = summary(found, now)
            changed = line.partition("  ")[2]  # all but the time
            if changed != before:
                console.print(line, soft_wrap=True)
            if found.ended:
                return
            before = changed
            time.sleep(interval)

    with Live(console=console, auto_refresh=False) as live:
        while True:
            found = look()
            live.update(screen(found, datetime.now()), refresh=True)
            if found.ended:
                return
            time.sleep(interval)


def _title(found: RunStatus) -> Text:
    title = Text.assemble((_state(found.state), COLOURS[found.state]), f"  {found.path}")
    title.overflow = "fold"
    if found.why:
        title.append(f"\n{found.why}", style=COLOURS[found.state])
    return title


def _state(state: str) -> str:
    # That it hangs is a guess.
    return "hung?" if state == "hung" else state


def _job(job: SlurmJob) -> str:
    told = f"job {job.job_id} {job.name}: {job.state}" + f" ({job.reason})" * bool(job.reason)
    told += f" on {job.nodes}" * bool(job.nodes)
    if job.state in RUNNING and job.end:
        told += f", time limit {job.time_limit} is over at {job.end:%Y-%m-%d %H:%M}"
    elif job.start:
        told += f", {'start' if not job.nodes else 'started'} {job.start:%Y-%m-%d %H:%M}"
    return told


def _progress(found: RunStatus) -> RenderableType:
    line = Table.grid(padding=(0, 2))
    share = found.iteration / found.last if found.last else 0.0
    bar = ProgressBar(total=1.0, completed=share, width=PROGRESS_WIDTH)
    line.add_row(f"{found.iteration:,} of {found.last:,}", bar, f"{100 * share:.1f} %")
    return line


def _losses(found: RunStatus) -> Text:
    told = Text(_loss(found.loss), style="" if found.loss is None or math.isfinite(found.loss) else "bold red")
    if found.validation is not None:
        told.append(f"   validation {found.validation:.4f} at iteration {found.validation_iteration:,}", style="")
    return told


def _loss(loss: float | None) -> str:
    return "-" if loss is None else f"{loss:.4f}"


def _trend(losses: Sequence[float]) -> str:
    low, high = min(losses), max(losses)
    step = (high - low) / (len(BARS) - 1) or 1.0
    return "".join(BARS[round((loss - low) / step)] for loss in losses) + f"  {losses[0]:.4f} → {losses[-1]:.4f}"


def _speed(found: RunStatus) -> str:
    told = [f"{found.seconds:.3f} s an iteration"]
    if found.tokens_per_second is not None:
        told.append(f"{found.tokens_per_second:,.0f} tokens/s")
        if found.tokens_per_gpu is not None:
            told.append(f"{found.tokens_per_gpu:,.0f} a GPU ({found.gpus:,} GPUs)")
    elif found.samples_per_second is not None:
        told.append(f"{found.samples_per_second:,.1f} samples/s")
    if found.tflops is not None:
        told.append(f"{found.tflops:.1f} TFLOP/s a GPU")
    return ", ".join(told)


def _ranks(times: RankTimes) -> str:
    return (
        f"slowest {times.slowest}: {times.slowest_seconds:.3f} s in the forwards of an iteration; "
        f"fastest {times.fastest}: {times.fastest_seconds:.3f} s"
    )


def _checkpoint(found: RunStatus, now: datetime) -> str:
    saved, saving, told = found.saved, found.saving, "none"
    if saved:
        told = f"iteration {saved.iteration:,}, {_clock(saved.time, now)}, {_ago(saved.time, now)}"
        told += f", in {saved.where}" * bool(saved.where)
    if saving:
        told += f"\nbeing saved: iteration {saving.iteration:,}, since {_clock(saving.time, now)}"
    return told


def _finish(found: RunStatus, now: datetime) -> Text:
    assert found.seconds_left is not None
    assert found.time is not None
    told = Text(span(found.seconds_left))
    end = datetime.fromtimestamp(found.time.timestamp() + found.seconds_left)
    told.append(f", at {_clock(end, now)}")
    job = found.slurm
    if job and job.state in RUNNING and job.end and job.end < end:
        told.append(", after the job's time limit: it has to be started again", style="yellow")
    return told


def _clock(moment: datetime, now: datetime) -> str:
    """Returns the time of a moment, with the date where it is another day."""
    return f"{moment:%H:%M:%S}" if moment.date() == now.date() else f"{moment:%Y-%m-%d %H:%M}"


def _ago(moment: datetime, now: datetime) -> str:
    return f"{span((now - moment).total_seconds())} ago"


def span(seconds: float) -> str:
    """Returns a duration in words: ``42 s``, ``3 min``, ``2 h 05 min``, ``3 d 4 h``."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    minutes, hours, days = whole // 60, whole // 3600, whole // 86400
    if hours == 0:
        return f"{minutes} min"
    return f"{hours} h {minutes % 60:02d} min" if days == 0 else f"{days} d {hours % 24} h"
