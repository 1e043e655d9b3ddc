"""How ``megasched import``, ``export`` and ``inspect`` look."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from megasched.cli.amounts import format_bytes, format_count
from megasched.weights.exporting import Exported
from megasched.weights.importing import Imported
from megasched.weights.inspection import Inspection
from megasched.weights.names import of_passed_over


def print_imported(found: Imported, console: Console) -> None:
    """What was written, and how a run takes it."""
    console.print(f"{escape(str(found.checkpoint))}: {found.architecture}, {_weights(found.tensors, found.bytes)}")
    if found.passed_over:
        console.print(escape(of_passed_over(found.architecture, found.passed_over)), soft_wrap=True)
    console.print(f"a run starts from it with --load {escape(str(found.checkpoint))}", soft_wrap=True)


def print_exported(found: Exported, console: Console) -> None:
    """What was written, of which checkpoint."""
    kind = "LoRA adapter of " if found.adapter else ""
    weights = f"{kind}{found.architecture} in {found.dtype}, {_weights(found.tensors, found.bytes)}"
    console.print(f"{escape(str(found.output))}: {weights}, of iteration {found.iteration}", soft_wrap=True)
    for count in found.absent:
        left = f"{count} in the config is 0 in the exported one: {found.architecture} has no such layers"
        console.print(escape(left), soft_wrap=True)
    loader = "PeftModel.from_pretrained(model, " if found.adapter else f"{found.architecture}.from_pretrained("
    console.print(f'{loader}"{escape(str(found.output))}") loads it', soft_wrap=True)


def print_inspection(found: Inspection, console: Console) -> None:
    """A checkpoint as tables."""
    console.print(f"[bold]{escape(str(found.folder))}[/bold]", soft_wrap=True)
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim")
    facts.add_column(overflow="fold")
    facts.add_row("iteration", str(found.iteration))
    if found.model_type:
        facts.add_row("model", found.model_type)
    if found.layout:
        facts.add_row("written at", " ".join(f"{name}{value}" for name, value in _told(found.layout)))
    facts.add_row("weights", f"{format_count(found.parameters)} parameters, {format_bytes(found.bytes)}")
    if found.optimizer:
        size = format_bytes(sum(found.optimizer.values()))
        facts.add_row("optimizer", f"{', '.join(found.optimizer)}: {size}")
    else:
        facts.add_row("optimizer", "none: weights alone")
    files = f"{len(found.files)}, {format_bytes(sum(found.files.values()))}"
    facts.add_row("files", files if not found.problems else f"{files} [bold red]incomplete[/bold red]")
    for problem in found.problems:
        facts.add_row("", f"[red]{escape(problem)}[/red]")
    console.print(facts)
    table = Table("tensor", "shape", "dtype", "count", "parameters", "size", box=None, pad_edge=False)
    for column in table.columns[3:]:
        column.justify = "right"
    for group in found.tensors:
        shape = " x ".join(map(str, group.shape))
        amounts = (str(group.count), format_count(group.parameters), format_bytes(group.bytes))
        table.add_row(escape(group.name), shape, group.dtype, *amounts)
    console.print(table)


def _told(layout: dict[str, Any]) -> list[tuple[str, Any]]:
    """What of a layout is worth a word: sizes over 1, and what is on."""
    told = {name: value for name, value in layout.items() if value is True or value not in (None, False, 1)}
    return [(name, "" if value is True else value) for name, value in told.items()] or [("one rank", "")]


def _weights(tensors: int, size: int) -> str:
    return f"{tensors} tensors, {format_bytes(size)}"
