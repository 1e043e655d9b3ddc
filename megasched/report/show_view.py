"""How ``megasched show`` looks in a terminal: a head line, the module tree, the stages."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from megasched.report.fold import Node, fold
from megasched.report.modules import CUT, ModuleReport, ParameterReport
from megasched.report.show import AUTO, ShowReport
from megasched.report.stages import StageReport

COLOURS = {
    "column": "green",
    "row": "cyan",
    "vocab": "magenta",
    "features": "magenta",
    "replicated": "yellow",
    "whole": "",
}
SOURCES_SHOWN = 2
LINE = 60
# Primitives whose effect the line of a module shows already.
TOLD_BY_THE_REST = ("shard", "checkpoint", "replace", "replace_all", CUT)


def print_report(report: ShowReport, console: Console) -> None:
    """Prints a report; made for 100 columns."""
    console.print(_head(report))
    console.print(_tree(report))
    console.print()
    console.print(_stage_table(report))
    console.print(_legend(report))
    for doubt in report.unverified:
        console.print(Text(f"not known to be right, a run would need --allow-unverified: {doubt}", "yellow"))


def format_count(count: int) -> str:
    """``8.03 B``, ``124.4 M``, ``61,440``."""
    for unit, size in (("T", 10**12), ("B", 10**9), ("M", 10**6)):
        if count >= size:
            value = count / size
            return f"{value:.2f} {unit}" if value < 10 else f"{value:.1f} {unit}"
    return f"{count:,}"


def _head(report: ShowReport) -> Text:
    text = Text(report.model, "bold")
    text.append(f"  {format_count(report.parameters)} parameters  on {report.layout}", "default not bold")
    text.append(f"\nmodel {report.hf_model}, schedule {report.schedule}\n", "dim not bold")
    return text


# ---- the tree ---------------------------------------------------------------------------------------


def _tree(report: ShowReport) -> Tree:
    root = fold(report.modules)
    show_sources = report.schedule != AUTO
    tree = Tree(_label(root, "", show_sources), guide_style="dim")
    _add_children(tree, root, show_sources)
    return tree


def _add_children(tree: Tree, node: Node, show_sources: bool, beside: str = "") -> None:
    """Adds a line for each child; ``beside`` is the name of the list that the node is a fold of."""
    for child in node.children:
        if child.children and all(grandchild.members for grandchild in child.children):
            _add_list(tree, child, show_sources)
        elif child.like and child.children:
            tree.add(Text.assemble((child.name, "bold"), (f"  as in {beside}.{child.like}", "dim")))
        else:
            _add_children(tree.add(_label(child, child.name, show_sources)), child, show_sources)


def _add_list(tree: Tree, node: Node, show_sources: bool) -> None:
    """A ``ModuleList`` is no line of its own; what is to be said of it stands at its first layers."""
    notes = node.reports[0].notes
    for group in node.children:
        branch = tree.add(_label(group, f"{node.name}.{group.name}", show_sources, notes))
        likes = {child.like for child in group.children}
        if len(likes) == 1 and likes != {""}:
            branch.add(Text(f"inside as {node.name}.{likes.pop()}", "dim"))
        else:
            _add_children(branch, group, show_sources, node.name)
        notes = ()


def _label(node: Node, name: str, show_sources: bool, notes: Iterable[str] = ()) -> Text:
    report = node.reports[0]
    text = Text(f"{name}  " if name else "", "bold")
    if node.members > 1:
        text.append(f"×{node.members}  ", "bold yellow")
    text.append(classes(report), f"not bold {COLOURS[report.kind]}".strip())
    if show_sources and node.sources:
        text.append(f"  {places(node.sources)}", "dim not bold")
    for line in [*lines(report), *notes]:
        text.append(f"\n  {line}", "not bold")
    return text


def classes(report: ModuleReport) -> str:
    """What a module is and becomes, in a few words."""
    if not report.hf_class:
        return f"{report.becomes} (new)"
    if report.becomes != report.hf_class:
        return f"{report.hf_class} → {report.becomes}"
    return f"{report.hf_class}, whole" if report.parameters else report.hf_class


def places(sources: list[str]) -> str:
    """Where the schedule asked, file names and lines; some of them where there are many."""
    places = (source.rpartition(":") for source in sources[:SOURCES_SHOWN])
    shown = [f"{Path(file).name}:{line}" for file, _, line in places]
    return ", ".join([*shown, "…"] if len(sources) > SOURCES_SHOWN else shown)


def lines(report: ModuleReport) -> list[str]:
    """What else there is to say of a module: its parameters, what it sends, notes and calls."""
    found = _joined([_parameter(parameter) for parameter in report.parameters])
    found += [_sent(report, tensor) for tensor in ("input", "output")]
    found += ["recomputed in the backward pass"] if report.recompute else []
    found += report.notes
    found += [asked.call for asked in report.asked if asked.primitive not in TOLD_BY_THE_REST]
    return [line for line in found if line]


def _joined(parameters: list[str]) -> list[str]:
    """Short ones on one line."""
    line = ", ".join(parameters)
    return [line] if len(line) <= LINE else parameters


def _sent(report: ModuleReport, tensor: str) -> str:
    """``input: all_gather forward, reduce_scatter backward (once for gate_proj, up_proj)``."""
    found = [transfer for transfer in report.transfers if transfer.tensor == tensor]
    if not found:
        return ""
    shared = f" (once for {', '.join(found[0].shared_by)})" if found[0].shared_by else ""
    return f"{tensor}: {', '.join(f'{transfer.op} {transfer.phase}' for transfer in found)}{shared}"


def _parameter(parameter: ParameterReport) -> str:
    text = f"{parameter.name} {list(parameter.shape)}"
    if parameter.local_shape != parameter.shape:
        text += f" → {list(parameter.local_shape)}"
    remarks = ["transposed"] if parameter.transposed else []
    remarks += [f"padded to {parameter.padded}"] if parameter.padded else []
    if parameter.components:
        remarks.append(f"packed {' + '.join(map(str, parameter.components))}, each cut")
    remarks += [f"tied to {parameter.tied_to}"] if parameter.tied_to else []
    text += f" ({'; '.join(remarks)})" if remarks else ""
    return f"{text}, gradient partial, summed over TP" if parameter.partial_gradient else text


# ---- the stages -------------------------------------------------------------------------------------


def _stage_table(report: ShowReport) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for name in ("stage", "pp rank", "vp stage", "layers"):
        table.add_column(name, justify="right")
    table.add_column("and")
    for name in ("parameters", "FLOPs"):
        table.add_column(name, justify="right")
    table.add_column("cut")
    for stage in report.stages:
        table.add_row(*_stage_row(report, stage))
    return table


def _stage_row(report: ShowReport, stage: StageReport) -> list[str]:
    end = places([stage.cut_at]) if stage.cut_at else "balanced"
    layers = f"{stage.start}-{stage.stop - 1}" if stage.stop - stage.start > 1 else str(stage.start)
    return [
        *(str(stage.stage), str(stage.pp_rank), str(stage.vp_stage), layers),
        ", ".join(path.rpartition(".")[2] for path in stage.holds),
        format_count(stage.parameters),
        f"{100 * stage.flops_share:.1f} %",
        "" if stage.stage == len(report.stages) - 1 else end,
    ]


def _legend(report: ShowReport) -> Text:
    text = f"parameters: on one rank; FLOPs: share of the forward pass at {report.sequence_length} tokens"
    if report.layout.vpp > 1:
        totals = [
            sum(stage.parameters for stage in report.stages if stage.pp_rank == rank)
            for rank in range(report.layout.pp)
        ]
        counts = ", ".join(f"{format_count(total)} on pp rank {rank}" for rank, total in enumerate(totals))
        text += f"\nall chunks together: {counts}"
    return Text(text, "dim")
