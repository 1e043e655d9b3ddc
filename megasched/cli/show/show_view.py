"""How ``megasched show`` looks in a terminal: a head line, then the tree of modules, by stage if there are any."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text
from rich.tree import Tree

from megasched.cli.amounts import format_bytes, format_count
from megasched.cli.show.fold import fold
from megasched.cli.show.module_view import ModuleLines
from megasched.cli.show.report import AUTO, ShowReport
from megasched.cli.show.stage_view import stage_legend, stage_table, stage_tree
from megasched.trainer.evidence.compatibility import of_unchecked_options


def print_report(report: ShowReport, console: Console) -> None:
    """Prints a report; made for 100 columns."""
    lines = ModuleLines(show_sources=report.schedule != AUTO)
    console.print(_head(report))
    if len(report.stages) > 1:
        console.print(stage_tree(report, lines))
        console.print()
        if report.layout.vpp > 1:
            console.print(stage_table(report))
        console.print(stage_legend(report))
    else:
        console.print(_tree(report, lines))
        console.print()
        console.print(_on_one_rank(report))
    for doubt in report.unverified:
        console.print(Text(f"not known to be right, a run would need --allow-unverified: {doubt}", "yellow"))
    if report.unchecked_options:
        console.print(Text(of_unchecked_options(report.unchecked_options, report.check), "yellow"))


def _head(report: ShowReport) -> Text:
    text = Text(report.model, "bold")
    trained = f" ({format_count(report.trained)} trained)" if report.trained < report.parameters else ""
    text.append(f"  {format_count(report.parameters)} parameters{trained}  on {report.layout}", "default not bold")
    text.append(f"\nmodel {report.hf_model}, schedule {report.schedule}\n", "dim not bold")
    return text


def _tree(report: ShowReport, lines: ModuleLines) -> Tree:
    root = fold(report.modules)
    tree = Tree(lines.label(root, "", 0), guide_style="dim")
    lines.add_children(tree, root, 1)
    return tree


def _on_one_rank(report: ShowReport) -> Text:
    (stage,) = report.stages
    amount = f"{format_count(stage.parameters)} parameters, {format_bytes(stage.parameter_bytes)} at 16 bits each"
    return Text(f"on one rank: {amount}", "dim")
