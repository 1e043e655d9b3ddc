"""The module tree of the page: lines to be folded and unfolded, layers that are treated alike as one."""

from __future__ import annotations

from dataclasses import dataclass, field

from megasched.cli.show.fold import Node, fold
from megasched.cli.show.module_view import classes, lines, places
from megasched.cli.show.report import AUTO, ShowReport


@dataclass
class TreeLine:
    """One module, or several that are treated alike.

    Attributes:
        name: as the tree calls it; empty for the model itself.
        members: layers that it stands for; 0 for one module.
        kind: how its weight lies over the TP ranks.
        classes: what it is and becomes.
        sources: where the schedule asked.
        facts: what else there is to say.
        children: below it.
    """

    name: str
    members: int
    kind: str
    classes: str
    sources: str
    facts: list[str]
    children: list[TreeLine] = field(default_factory=list)


def module_tree(report: ShowReport) -> TreeLine:
    """The tree of a report, as deep as it is."""
    return _line(fold(report.modules), "", show_sources=report.schedule != AUTO)


def _line(node: Node, beside: str, *, show_sources: bool) -> TreeLine:
    """
    Args:
        beside: name of the list that the node is in, for a fold of its members.
    """
    first = node.reports[0]
    listed = bool(node.children) and all(child.members for child in node.children)
    name = f"{beside}.{node.name}" if node.members else node.name
    if node.like and node.children:
        return TreeLine(name, 0, first.kind, f"as in {beside}.{node.like}", "", [])
    below = node.name if listed else beside
    return TreeLine(
        name,
        node.members if node.members > 1 else 0,
        first.kind,
        classes(first),
        places(node.sources) if show_sources and not listed else "",
        lines(first),
        [_line(child, below, show_sources=show_sources) for child in node.children],
    )
