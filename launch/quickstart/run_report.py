"""Shows the result of the quickstart at its end: a table, a loss curve, and what to try next."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from megasched.errors import MegaschedError
from megasched.launch.status.training_log import Iteration, TrainingLog
from megasched.printing.shell_command import short_path

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

# One step sees a few hundred tokens; the mean of so many steps says where training stands.
LAST_STEPS = 20


@dataclass(frozen=True)
class Summary:
    """Holds the outcome of a run; losses are in nats per token, and a token is a byte.

    Attributes:
        steps: number of optimizer steps done.
        first_loss: training loss of the first step.
        last_loss: mean training loss of the last `LAST_STEPS` steps.
        validation: iteration -> validation loss, in order of iterations.
        tokens_per_second: over all steps but the first, which warms up; 0 when there is only one.
        train_seconds: sum over the steps, without validation and checkpoints.
    """

    steps: int
    first_loss: float
    last_loss: float
    tokens_per_second: float
    train_seconds: float
    validation: dict[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Result:
    """Holds everything that the quickstart tells at its end.

    Attributes:
        summary: the numbers.
        total_seconds: wall time of the whole run with its start.
        curve, checkpoints, log: paths of what the run has left.
        next_commands: what to try next, as pairs of purpose and command.
    """

    summary: Summary
    total_seconds: float
    curve: Path
    checkpoints: Path
    log: Path
    next_commands: list[tuple[str, str]]

    def to_dict(self) -> dict[str, Any]:
        """Returns the result as plain data for JSON."""
        return {
            **asdict(self.summary),
            "total_seconds": self.total_seconds,
            "curve": str(self.curve),
            "checkpoints": str(self.checkpoints),
            "log": str(self.log),
            "next": [{"what": what, "command": command} for what, command in self.next_commands],
        }


@contextmanager
def progress(console: Console, starting: str, steps: int) -> Iterator[Callable[[Iteration], None]]:
    """Shows how far training is; yields a function to call with each step.

    On a terminal it is a bar, with ``starting`` as its text until the first step; elsewhere (a CI log), ten lines.
    """
    if not console.is_terminal:
        every = max(1, steps // 10)

        def show_line(step: Iteration) -> None:
            if step.iteration == 1 or step.iteration % every == 0:
                console.print(f"iteration {step.iteration}/{steps}: loss {step.loss:.3f}")

        console.print(starting)
        yield show_line
        return

    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(starting, total=steps)

        def show_bar(step: Iteration) -> None:
            bar.update(task, completed=step.iteration, description=f"training, loss {step.loss:.3f}")

        yield show_bar


def summarize(log: TrainingLog, tokens_per_step: int) -> Summary:
    """Returns the outcome of a run.

    Raises:
        MegaschedError: the log has no line of an iteration.
    """
    steps = log.iterations
    if not steps:
        raise MegaschedError("training ended well, yet its log has no line of an iteration")
    warm = sum(step.seconds for step in steps[1:])
    return Summary(
        steps=len(steps),
        first_loss=steps[0].loss,
        last_loss=fmean(step.loss for step in steps[-LAST_STEPS:]),
        tokens_per_second=tokens_per_step * (len(steps) - 1) / warm if warm else 0.0,
        train_seconds=sum(step.seconds for step in steps),
        validation=dict(sorted(log.validation.items())),
    )


def result_table(summary: Summary, *, total_seconds: float, checkpoints: Path, curve: Path) -> Table:
    """Returns the outcome as a rich table; ``total_seconds`` is the wall time of the whole run with its start."""
    from rich.table import Table

    table = Table(title="quickstart", show_header=False, title_justify="left")
    table.add_column()
    table.add_column(overflow="fold")  # a path that is cut short is of no use
    averaged = min(LAST_STEPS, summary.steps)
    table.add_row("training loss, first step", f"{summary.first_loss:.3f} nats per byte")
    table.add_row(f"training loss, mean of last {averaged} steps", f"{summary.last_loss:.3f} nats per byte")
    if summary.validation:
        iteration, loss = list(summary.validation.items())[-1]
        table.add_row(f"validation loss, iteration {iteration}", f"{loss:.3f} nats per byte")
    table.add_row("speed", f"{summary.tokens_per_second:,.0f} tokens/s")
    table.add_row("time", f"{summary.train_seconds:.0f} s training, {total_seconds:.0f} s in all")
    table.add_row("loss curve", short_path(curve))
    table.add_row("checkpoint", short_path(checkpoints))
    return table


def print_result(result: Result, console: Console) -> None:
    """Prints the table, and what to try next."""
    table = result_table(
        result.summary,
        total_seconds=result.total_seconds,
        checkpoints=result.checkpoints,
        curve=result.curve,
    )
    console.print(table)
    console.print("\nto try next:", style="bold")
    for what, command in result.next_commands:
        console.print(f"\n# {what}\n{command}", soft_wrap=True)


def save_loss_curve(log: TrainingLog, path: Path) -> None:
    """Draws training and validation loss over iterations into a PNG; needs no display."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    steps = log.iterations
    axes.plot([step.iteration for step in steps], [step.loss for step in steps], linewidth=1, label="training")
    if log.validation:
        points = sorted(log.validation.items())
        axes.plot(*zip(*points, strict=True), marker="o", label="validation")
    axes.set_xlabel("iteration")
    axes.set_ylabel("loss (nats per byte)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
