"""What primitives on sub-graphs have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megasched.errors import Problem, ScheduleError
from megasched.records import caller_source
from megasched.registry import Node

if TYPE_CHECKING:
    from megasched.graph.subgraph import Subgraph


def record_subgraph(node: Node, value: Any, primitive: str, *, inlined: bool = False) -> dict[str, Any]:
    """A sub-graph as a record keeps it.

    Args:
        inlined: what is made of it looks inside, so that it must hold no live calls.

    Raises:
        ScheduleError: it is no part of this traced module, or can't be handled as one.
    """
    from megasched.graph.partition import check_part
    from megasched.graph.subgraph import as_subgraph
    from megasched.graph.trial import graph_of

    subgraph: Subgraph = as_subgraph(value, node.path, primitive)
    problems = check_part(graph_of(node), subgraph, node.path, caller_source(), inlined=inlined)
    if problems:
        raise ScheduleError(problems)
    return subgraph.as_data()


def check_overlap(node: Node, arguments: Mapping[str, Any], source: str) -> list[Problem]:
    """A problem if a call before this one has taken some of its operations."""
    mine = arguments.get("subgraph")
    if mine is None:
        return []
    for record in node.root.records:
        other = record.arguments.get("subgraph")
        if record.path != node.path or other is None:
            continue
        if other is mine:
            return []
        shared = [name for name in mine["nodes"] if name in other["nodes"]]
        if shared:
            what = f"{', '.join(shared)} belongs to the sub-graph of {record.primitive} at {record.source} already"
            return [Problem(what, node.path, source, "keep one of the two, or leave these operations out")]
    return []
