"""What primitives on sub-graphs have in common."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from megasched.errors import Problem, ScheduleError
from megasched.language.records import Record, caller_source
from megasched.language.registry import Node

if TYPE_CHECKING:
    from megasched.graph.subgraph import Subgraph


def record_subgraph(node: Node, value: Any, primitive: str, *, inlined: bool = False) -> dict[str, Any]:
    """A sub-graph as a record keeps it.

    Args:
        inlined: what is made of it looks inside, so that it must hold no live calls.

    Raises:
        ScheduleError: it is no part of this traced module, or can't be handled as one.
    """
    from megasched.graph.definition_graphs import graph_of
    from megasched.graph.partition import check_part
    from megasched.graph.subgraph import as_subgraph

    subgraph: Subgraph = as_subgraph(value, node.path, primitive)
    problems = check_part(graph_of(node), subgraph, node.path, caller_source(), inlined=inlined)
    if problems:
        raise ScheduleError(problems)
    return subgraph.as_data()


def check_edit(primitive: str, node: Node, arguments: Mapping[str, Any], source: str) -> list[Problem]:
    """What keeps ``primitive`` from handling a sub-graph, in view of all other calls of the schedule."""
    if "subgraph" not in arguments:
        return []
    mine = arguments["subgraph"]
    edits = [r for r in node.root.records if r.path == node.path and "subgraph" in r.arguments]
    before = list(takewhile(lambda record: record.arguments["subgraph"] is not mine, edits))
    problem = (
        _overlap(primitive, node, mine, before, source)
        or _tangle(primitive, node, mine, before, source)
        or _covered(node, mine, source)
        or _live_product(primitive, node, mine, source)
    )
    return [problem] if problem else []


def _covered(node: Node, mine: Mapping[str, Any], source: str) -> Problem | None:
    """A problem if operations belong to a module that another call makes one call."""
    prefix = f"{node.path}." if node.path else ""
    for record in node.root.records:
        inner = record.path.removeprefix(prefix)
        if not inner or not record.path.startswith(prefix) or not _makes_one_call(node, record):
            continue
        held = [name for name in mine["nodes"] if name.startswith(f"{inner}.")]
        if held:
            what = f"{', '.join(held)} is no operation of the graph when it runs: {record.primitive} at "
            what += f"{record.source} makes {record.path} one call"
            remedy = f'trace that module by itself: sch["{record.path}"].trace()'
            return Problem(what, node.path, source, remedy)
    return None


def _live_product(primitive: str, node: Node, mine: Mapping[str, Any], source: str) -> Problem | None:
    """A problem if operations belong to the product of a linear that is decomposed and sharded: a live call of
    Megatron's layer computes it, though the graph of the definition shows what it does."""
    sharded = {record.path: record for record in node.root.records if record.primitive == "shard"}
    prefix = f"{node.path}." if node.path else ""
    for record in node.root.records:
        if record.primitive != "decompose" or record.path not in sharded or not record.path.startswith(prefix):
            continue
        inner = re.escape(record.path.removeprefix(prefix))
        gone = rf"{inner}\.(t|matmul)(_\d+)?" if primitive == "fuse" else rf"{inner}\.t(_\d+)?"
        held = [name for name in mine["nodes"] if re.fullmatch(gone, name)]
        if held:
            what = f"{primitive}: {', '.join(held)} can't be taken: {record.path} is sharded at "
            what += f"{sharded[record.path].source}, so that a live call computes its product"
            return Problem(what, node.path, source, "leave the product out; bias and what follows can be taken")
    return None


def _makes_one_call(node: Node, record: Record) -> bool:
    """Whether the module of this record is one call in the graph of a module around it."""
    if record.primitive == "sync":  # of a sharded module, its layer does what is asked
        return not any(other.primitive == "shard" and other.path == record.path for other in node.root.records)
    return record.primitive in ("checkpoint", "fork_rng", "hook") and "subgraph" not in record.arguments


def _overlap(
    primitive: str, node: Node, mine: Mapping[str, Any], before: Sequence[Record], source: str
) -> Problem | None:
    """A problem if an edit before this one has taken some of its operations."""
    for record in before:
        shared = [name for name in mine["nodes"] if name in record.arguments["subgraph"]["nodes"]]
        if shared:
            what = f"{primitive}: {', '.join(shared)} belongs to the sub-graph of {record.primitive} at "
            what += f"{record.source} already"
            return Problem(what, node.path, source, "keep one of the two, or leave these operations out of one")
    return None


def _tangle(
    primitive: str, node: Node, mine: Mapping[str, Any], before: Sequence[Record], source: str
) -> Problem | None:
    """A problem if this edit and those before it would each wait for the other's results."""
    from megasched.graph.definition_graphs import graph_of
    from megasched.graph.partition import is_tangled

    graph = graph_of(node)

    def tangled(records: Sequence[Record]) -> bool:
        return is_tangled(graph, [mine["nodes"], *(record.arguments["subgraph"]["nodes"] for record in records)])

    if not tangled(before):
        return None
    knot = list(before)
    for record in before:  # those without which there is none
        if tangled([one for one in knot if one is not record]):
            knot = [one for one in knot if one is not record]
    others = ", ".join(f"{record.primitive} at {record.source}" for record in knot)
    what = f"{primitive}: this sub-graph and that of {others} each need a result of the other"
    return Problem(what, node.path, source, "join them into one with |, or make one of them smaller")
