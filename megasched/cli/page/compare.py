"""Compares the steps of two layouts, or of two schedules, figure by figure, for ``megasched show --diff``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from megasched.cli.output import format_bytes, format_seconds
from megasched.cli.page.page import Page, idle_share
from megasched.printing.tables import plain_table

SENT = "what is sent in a step: over DP by the largest pipeline rank, else by all stages of one replica"


def _share(value: float) -> str:
    return f"{value:.1%}"


def _number(value: float) -> str:
    return f"{value:,.0f}"


FORMATS: dict[str, Callable[[float], str]] = {
    "count": _number,
    "seconds": format_seconds,
    "share": _share,
    "tokens/s": _number,
    "bytes": format_bytes,
}


@dataclass(frozen=True)
class ComparedFigure:
    """Represents one figure of two steps.

    Attributes:
        name: what it is, e.g. ``Step time``.
        unit: one of `FORMATS`.
        first, second: its value in each step; None where it is not known.
    """

    name: str
    unit: str
    first: float | None
    second: float | None

    @property
    def difference(self) -> float | None:
        """Returns by how much the second is more; None where either is not known."""
        return None if self.first is None or self.second is None else self.second - self.first

    @property
    def cells(self) -> tuple[str, str, str]:
        """Returns both values and the difference, formatted; shares differ by points."""
        values = (self.first, self.second)
        first, second = ("not known" if value is None else FORMATS[self.unit](value) for value in values)
        return first, second, self._change()

    def _change(self) -> str:
        change = self.difference
        if change is None or not change:
            return "" if change is None else "same"
        if self.unit == "share":
            return f"{100 * change:+.1f} points"
        amount = f"{'+' if change > 0 else '-'}{FORMATS[self.unit](abs(change))}"
        return f"{amount} ({change / self.first:+.1%})" if self.first and self.unit != "count" else amount

    def to_dict(self) -> dict[str, Any]:
        """Returns the figure as plain data for JSON."""
        return {**vars(self), "difference": self.difference}


@dataclass(frozen=True)
class StepComparison:
    """Holds two pages of one model, on the same hardware and with as many sequences in a step.

    Attributes:
        titles: what tells them apart: their layouts, or their schedules.
        pages: the pages of both.
        sequences: number of sequences in a step.
    """

    titles: tuple[str, str]
    pages: tuple[Page, Page]
    sequences: int

    @property
    def figures(self) -> list[ComparedFigure]:
        """Returns the figures of both steps, those of the hardware first, then what each collective sends."""
        first, second = (dict(_figures(page)) for page in self.pages)
        units = {name: unit for page in (first, second) for name, (unit, _) in page.items()}
        absent = ("", 0.0)
        return [
            ComparedFigure(name, unit, first.get(name, absent)[1], second.get(name, absent)[1])
            for name, unit in sorted(units.items(), key=lambda one: _order(one[0]))
        ]

    @property
    def notes(self) -> list[str]:
        """Returns remarks on the figures, in words: what is not known and why, and what does not fit."""
        step = self.pages[0].report.step
        notes = [] if step.hardware else ["step time and tokens/s are not known: name the hardware with --gpu"]
        for title, page in zip(self.titles, self.pages, strict=True):
            step = page.report.step
            if step.why_not:
                notes.append(f"{title} is not predicted: {step.why_not}")
            elif step.hardware and step.peak_bytes and step.peak_bytes > step.hardware.usable_bytes:
                notes.append(f"{title} does not fit into the memory of a GPU")
        return [*notes, SENT] if any(page.volumes for page in self.pages) else notes

    @property
    def about(self) -> str:
        """Returns what both have in common, in words."""
        report = self.pages[0].report
        where = f"on {report.step.hardware.name}, " if report.step.hardware else ""
        return f"{where}{self.sequences:,} sequences of {report.sequence_length:,} tokens in a step"

    def to_dict(self) -> dict[str, Any]:
        """Returns the comparison as plain data for JSON, with the figures unformatted."""
        report = self.pages[0].report
        return {
            **dict(zip(("first", "second"), self.titles, strict=True)),
            "gpu": report.step.hardware and report.step.hardware.name,
            "global_batch_size": self.sequences,
            "sequence_length": report.sequence_length,
            "figures": [figure.to_dict() for figure in self.figures],
            "notes": self.notes,
        }


def _figures(page: Page) -> Iterator[tuple[str, tuple[str, float | None]]]:
    """Yields the name of each figure of a page, with its unit and value."""
    step, layout = page.report.step, page.report.layout
    yield "GPUs", ("count", layout.world_size)
    yield "Micro-batches in a step", ("count", step.microbatches)
    yield "Step time", ("seconds", step.seconds)
    yield "Pipeline bubble", ("share", idle_share(page) if step.hardware is None else step.waiting)
    yield "Tokens/s per GPU", ("tokens/s", step.tokens_per_second)
    yield "Peak memory of a GPU", ("bytes", step.peak_bytes)
    if step.hardware is not None:
        room = step.hardware.usable_bytes
        share = None if step.peak_bytes is None else step.peak_bytes / room
        yield f"of the {format_bytes(room)} for tensors", ("share", share)
    sent: dict[str, float | None] = {}
    for volume in page.volumes:
        name = f"Sent over {volume.group}, {volume.op}"
        before, times = sent.get(name, 0.0), 1 if volume.phase == "step" else step.microbatches
        sent[name] = None if before is None or volume.bytes is None else before + times * volume.bytes
    for name, amount in sent.items():
        yield name, ("bytes", amount)


def _order(name: str) -> int:
    """Returns where a figure stands among the others: collectives after the rest, group by group."""
    groups = ("TP", "CP", "PP", "EP", "DP")
    return next((place for place, group in enumerate(groups, 1) if name.startswith(f"Sent over {group}")), 0)


def print_comparison(comparison: StepComparison, console: Console) -> None:
    """Prints the figures of both, laid out for 100 columns."""
    report = comparison.pages[0].report
    console.print(Text(f"{report.model}: {comparison.about}\n"))
    console.print(_table(comparison))
    console.print()
    for note in comparison.notes:
        console.print(Text(note, "dim"))


def _table(comparison: StepComparison) -> Table:
    table = plain_table("", *comparison.titles, "difference", overflow="fold")
    for column in table.columns[1:]:
        column.justify = "right"
    for figure in comparison.figures:
        table.add_row(figure.name, *figure.cells)
    return table
