"""Formats a module for the tree of ``megasched show``: its class, what becomes of it, and what else changes."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from rich.text import Text
from rich.tree import Tree

from megasched.cli.show.fold import Node
from megasched.cli.show.modules import ModuleReport, ParameterReport
from megasched.language.registry import get_primitive

COLOURS = {
    "column": "green",
    "row": "cyan",
    "vocab": "magenta",
    "features": "magenta",
    "channels": "green",
    "replicated": "yellow",
    "whole": "",
}
SOURCES_SHOWN = 2
LINE = 60
# Columns of a first line at the root, and what each level of the tree takes of them.
WIDTH = 98
INDENT = 4


class ModuleLines:
    """Writes modules into a rich tree.

    Args:
        show_sources: whether to name the lines of the schedule that asked for something.
    """

    def __init__(self, *, show_sources: bool) -> None:
        self.show_sources = show_sources

    def add(
        self, tree: Tree, node: Node, name: str, depth: int, *, beside: str = "", notes: Iterable[str] = ()
    ) -> None:
        """Adds a module and all modules below it.

        Args:
            name: the name to print.
            depth: depth of the new line; lines are shorter further in.
            beside: name of the list that contains the node, or of which it is a fold.
            notes: further remarks on the module.
        """
        if node.members and node.like:
            tree.add(self.as_before(node, name, beside))
            return
        branch = tree.add(self.label(node, name, depth, notes))
        likes = {child.like for child in node.children}
        if node.members and len(likes) == 1 and likes != {""}:
            branch.add(Text(f"inside as {beside}.{likes.pop()}", "dim"))
        else:
            self.add_children(branch, node, depth + 1, beside)

    def add_children(self, tree: Tree, node: Node, depth: int, beside: str = "") -> None:
        """Adds the modules below a node."""
        for child in node.children:
            if child.children and all(grandchild.members for grandchild in child.children):
                self._add_list(tree, child, depth)
            elif child.like and child.children:
                tree.add(Text.assemble((child.name, "bold"), (f"  as in {beside}.{child.like}", "dim")))
            else:
                self.add(tree, child, child.name, depth, beside=beside)

    def _add_list(self, tree: Tree, node: Node, depth: int) -> None:
        """Adds the members of a ``ModuleList``, which has no own line: its notes stand at its first members."""
        notes = node.reports[0].notes
        for group in node.children:
            self.add(tree, group, f"{node.name}.{group.name}", depth, beside=node.name, notes=notes)
            notes = ()

    def label(self, node: Node, name: str, depth: int, notes: Iterable[str] = ()) -> Text:
        """Returns the text of one module: its class, its parameters if there is room, and a line for each fact."""
        report = node.reports[0]
        text = Text(f"{name}  " if name else "", "bold")
        if node.members > 1:
            text.append(f"×{node.members}  ", "bold yellow")
        text.append(classes(report), f"not bold {COLOURS[report.kind]}".strip())
        source = f"  {places(node.sources)}" if self.show_sources and node.sources else ""
        facts = [*lines(report), *notes]
        room = WIDTH - INDENT * depth - len(text) - len(source)
        if len(_parameter_lines(report)) == 1 and len(facts[0]) < room:
            text.append(f"  {facts.pop(0)}", "not bold")
        text.append(source, "dim not bold")
        for line in facts:
            text.append(f"\n  {line}", "not bold")
        return text

    def as_before(self, node: Node, name: str, beside: str) -> Text:
        """Returns the text of layers that are treated like those of an earlier stage."""
        text = Text(f"{name}  ", "bold")
        if node.members > 1:
            text.append(f"×{node.members}  ", "bold yellow")
        return text.append(f"as {beside}.{node.like}", "dim not bold")


def classes(report: ModuleReport) -> str:
    """Returns the class of a module and what becomes of it, in a few words."""
    if not report.hf_class:
        return f"{report.becomes} (new)"
    if report.becomes != report.hf_class:
        return f"{report.hf_class} → {report.becomes}"
    return f"{report.hf_class}, whole" if report.parameters else report.hf_class


def places(sources: list[str]) -> str:
    """Returns where the schedule asked, as file names and lines; an ellipsis stands for all but the first few."""
    places = (source.rpartition(":") for source in sources[:SOURCES_SHOWN])
    shown = [f"{Path(file).name}:{line}" for file, _, line in places]
    return ", ".join([*shown, "…"] if len(sources) > SOURCES_SHOWN else shown)


def lines(report: ModuleReport) -> list[str]:
    """Returns the other facts about a module: its parameters, what it sends, notes and calls."""
    found = _parameter_lines(report)
    found += [_sent(report, tensor) for tensor in ("input", "output")]
    found += ["recomputed in the backward pass"] if report.recompute else []
    found += report.notes
    found += [asked.call for asked in report.asked if not get_primitive(asked.primitive).shown_by_effect]
    return [line for line in found if line]


def _parameter_lines(report: ModuleReport) -> list[str]:
    """Returns the parameters of a module, on one line if they are short."""
    parameters = [_parameter(parameter) for parameter in report.parameters]
    line = ", ".join(parameters)
    return [line] if parameters and len(line) <= LINE else parameters


def _sent(report: ModuleReport, tensor: str) -> str:
    """Returns what a module sends, e.g. ``input: all_gather forward (once for gate_proj, up_proj)``, or ""."""
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
