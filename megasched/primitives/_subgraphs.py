"""What primitives on sub-graphs have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megasched.errors import Problem, ScheduleError
from megasched.records import Record, caller_source
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


def check_edit(node: Node, arguments: Mapping[str, Any], source: str) -> list[Problem]:
    """What keeps a sub-graph from being handled, in view of all other calls of the schedule."""
    if "subgraph" not in arguments:
        return []
    return _overlaps(node, arguments, source) + _covered(node, arguments, source)


def _covered(node: Node, arguments: Mapping[str, Any], source: str) -> list[Problem]:
    """A problem if operations belong to a module that another call makes one call."""
    prefix = f"{node.path}." if node.path else ""
    for record in node.root.records:
        inner = record.path.removeprefix(prefix)
        if not inner or not record.path.startswith(prefix) or not _makes_one_call(node, record):
            continue
        held = [name for name in arguments["subgraph"]["nodes"] if name.startswith(f"{inner}.")]
        if held:
            what = f"{', '.join(held)} is no operation of the graph when it runs: {record.primitive} at "
            what += f"{record.source} makes {record.path} one call"
            remedy = f'trace that module by itself: sch["{record.path}"].trace()'
            return [Problem(what, node.path, source, remedy)]
    return []


def _makes_one_call(node: Node, record: Record) -> bool:
    """Whether the module of this record is one call in the graph of a module around it."""
    if record.primitive == "sync":  # of a sharded module, its layer does what is asked
        return not any(other.primitive == "shard" and other.path == record.path for other in node.root.records)
    return record.primitive in ("checkpoint", "fork_rng", "hook") and "subgraph" not in record.arguments


def _overlaps(node: Node, arguments: Mapping[str, Any], source: str) -> list[Problem]:
    """A problem if a call before this one has taken some of its operations."""
    mine = arguments["subgraph"]
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
