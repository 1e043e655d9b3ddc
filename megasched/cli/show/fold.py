"""Builds the module tree of a report, with layers that are treated alike folded into one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from megasched.cli.show.modules import CUT, ModuleReport
from megasched.plan.decisions import fold_indices


@dataclass
class Node:
    """Represents one line of the tree.

    Attributes:
        name: last part of the path; for a fold, the indices: ``0-3``.
        reports: reports of every module folded into it, in their order.
        children: nodes below it, in the order of the definition.
        members: number of children of one list that it stands for; 0 for a module outside of lists.
        like: for a fold of layers, an earlier fold, of another stage, that is treated alike; for a child of a
            fold, an earlier fold in which the same child is treated alike; otherwise empty.
    """

    name: str
    reports: list[ModuleReport]
    children: list[Node] = field(default_factory=list)
    members: int = 0
    like: str = ""

    @property
    def sources(self) -> list[str]:
        """Returns each place where the schedule asked for something of these modules; stages tell the cuts."""
        asked = (asked for report in self.reports for asked in report.asked)
        return list(dict.fromkeys(a.source for a in asked if a.primitive != CUT))


def fold(reports: Sequence[ModuleReport], *, by_stage: bool = False) -> Node:
    """Returns the tree of these modules; children with numbers for names are folded where they are treated alike.

    Args:
        reports: parents before children, as ``describe_modules`` returns them.
        by_stage: whether to fold only modules that live on the same pipeline stages.
    """
    nodes = {report.path: Node(report.path.rpartition(".")[2], [report]) for report in reports}
    for path, node in nodes.items():
        if path:
            nodes[path.rpartition(".")[0]].children.append(node)
    return _folded(nodes[""], by_stage)


def _folded(node: Node, by_stage: bool) -> Node:
    children = [_folded(child, by_stage) for child in node.children]
    if children and all(child.name.isdigit() for child in children):
        groups: dict[Any, list[Node]] = {}
        for child in children:
            stages = child.reports[0].stages if by_stage else ()
            groups.setdefault((stages, _treatment(child)), []).append(child)
        children = [
            _merged(alike, fold_indices([int(n.name) for n in alike]), len(alike)) for alike in groups.values()
        ]
        _compare(children)
    return Node(node.name, node.reports, children)


def _treatment(node: Node) -> tuple[Any, ...]:
    children = tuple((child.name, _treatment(child)) for child in node.children)
    return (node.reports[0].treatment(), children)


def _compare(folds: list[Node]) -> None:
    """Sets ``like`` of each fold, and of each child of one, to the first earlier fold that is treated alike."""
    seen: dict[Any, str] = {}
    for node in folds:
        for name, same in (("", node), *((child.name, child) for child in node.children)):
            like = seen.setdefault((name, _treatment(same)), node.name)
            same.like = "" if like == node.name else like


def _merged(nodes: list[Node], name: str, members: int) -> Node:
    columns = zip(*(node.children for node in nodes), strict=True)
    children = [_merged(list(alike), alike[0].name, alike[0].members) for alike in columns]
    reports = [report for node in nodes for report in node.reports]
    return Node(name, reports, children, members, nodes[0].like)
