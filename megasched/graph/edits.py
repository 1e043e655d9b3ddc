"""Keeps sub-graphs that are arguments of primitives in records, and checks them against all other calls."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from torch import nn

from megasched.errors import Problem, ScheduleError
from megasched.graph.definition_graphs import graph_of, shards
from megasched.graph.partition import check_subgraph, is_tangled
from megasched.language.records import Record, caller_source
from megasched.language.registry import (
    Node,
    Primitive,
    get_primitive,
    records_where,
)
from megasched.language.subgraph import as_subgraph


def record_subgraph(primitive: Primitive, node: Node, value: Any) -> dict[str, Any]:
    """Returns the data that a record keeps of a sub-graph.

    Raises:
        ScheduleError: it is not part of this traced module, or can't be handled as one.
    """
    subgraph = as_subgraph(value, node.path, primitive.name)
    inlined = primitive.inlines_subgraph
    problems = check_subgraph(graph_of(node), subgraph, node.path, caller_source(), inlined=inlined)
    if problems:
        raise ScheduleError(problems)
    return subgraph.as_data()


def check_edit(primitive: Primitive, node: Node, arguments: Mapping[str, Any], source: str) -> list[Problem]:
    """Returns the problems that keep ``primitive`` from handling a sub-graph, in view of all other calls."""
    mine = arguments["subgraph"]
    edits = records_where(node.root.records, lambda other: other.takes_subgraph)
    edits = [record for record in edits if record.path == node.path and "subgraph" in record.arguments]
    before = list(takewhile(lambda record: record.arguments["subgraph"] is not mine, edits))
    problem = (
        _overlap(primitive, node, mine, before, source)
        or _tangle(primitive, node, mine, before, source)
        or _covered(node, mine, source)
        or _live_product(primitive, node, mine, source)
        or _factory(node, arguments, source)
    )
    return [problem] if problem else []


def _factory(node: Node, arguments: Mapping[str, Any], source: str) -> Problem | None:
    """Returns a problem with what is to run in the part's place, as far as that is seen without running it."""
    factory = arguments.get("factory")
    if factory is None or (callable(factory) and not isinstance(factory, nn.Module)):
        return None
    return replacement_problem(factory, arguments["subgraph"].get("inputs", ()), node.path, source)


def replacement_problem(new: Any, inputs: Sequence[str], path: str, source: str) -> Problem | None:
    """Returns a problem with what is to run in a part's place; None if it can run there.

    Args:
        inputs: names of what the part reads.
    """
    if not callable(new):
        what = f"replace: {type(new).__name__} can't be called, and is to run in the place of a sub-graph"
        return Problem(what, path, source, "give or return a module or a function")
    if isinstance(new, nn.Module) and any(True for _ in new.parameters()):
        what = f"{type(new).__name__} has parameters, which no checkpoint and no optimizer would know"
        named = f": {', '.join(inputs)}" if inputs else ""
        return Problem(what, path, source, f"take the module's own as inputs{named}")
    return None


def _covered(node: Node, mine: Mapping[str, Any], source: str) -> Problem | None:
    """Returns a problem if operations belong to a module that another call turns into one call."""
    prefix = f"{node.path}." if node.path else ""
    for record in node.root.records:
        inner = record.path.removeprefix(prefix)
        if not inner or not record.path.startswith(prefix) or not makes_one_call(node, record):
            continue
        held = [name for name in mine["nodes"] if name.startswith(f"{inner}.")]
        if held:
            what = f"{', '.join(held)} is no operation of the graph when it runs: {record.primitive} at "
            what += f"{record.source} makes {record.path} one call"
            remedy = f'trace that module by itself: sch["{record.path}"].trace()'
            return Problem(what, node.path, source, remedy)
    return None


def _live_product(primitive: Primitive, node: Node, mine: Mapping[str, Any], source: str) -> Problem | None:
    """Returns a problem if operations belong to the product of a linear that is decomposed and sharded.

    A live call of Megatron's layer computes that product, though the definition's graph shows its operations.
    """
    sharded = shards(node)
    prefix = f"{node.path}." if node.path else ""
    for record in node.root.records:
        if record.primitive != "decompose" or record.path not in sharded or not record.path.startswith(prefix):
            continue
        inner = re.escape(record.path.removeprefix(prefix))
        gone = rf"{inner}\.(t|matmul)(_\d+)?" if primitive.inlines_subgraph else rf"{inner}\.t(_\d+)?"
        held = [name for name in mine["nodes"] if re.fullmatch(gone, name)]
        if held:
            what = f"{primitive.name}: {', '.join(held)} can't be taken: {record.path} is sharded at "
            what += f"{sharded[record.path].source}, so that a live call computes its product"
            return Problem(what, node.path, source, "leave the product out; bias and what follows can be taken")
    return None


def makes_one_call(node: Node, record: Record) -> bool:
    """Returns whether the module of this record is one call in the graph of a module around it."""
    one_call = get_primitive(record.primitive).one_call_in_graph
    if one_call == "unless sharded":  # of a sharded module, its layer does what is asked
        return record.path not in shards(node)
    return one_call == "always" and "subgraph" not in record.arguments


def _overlap(
    primitive: Primitive, node: Node, mine: Mapping[str, Any], before: Sequence[Record], source: str
) -> Problem | None:
    """Returns a problem if an earlier edit has taken some of its operations."""
    for record in before:
        shared = [name for name in mine["nodes"] if name in record.arguments["subgraph"]["nodes"]]
        if shared:
            what = f"{primitive.name}: {', '.join(shared)} belongs to the sub-graph of {record.primitive} at "
            what += f"{record.source} already"
            return Problem(what, node.path, source, "keep one of the two, or leave these operations out of one")
    return None


def _tangle(
    primitive: Primitive, node: Node, mine: Mapping[str, Any], before: Sequence[Record], source: str
) -> Problem | None:
    """Returns a problem if this edit and earlier ones would each wait for the other's results."""
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
    what = f"{primitive.name}: this sub-graph and that of {others} each need a result of the other"
    return Problem(what, node.path, source, "join them into one with |, or make one of them smaller")
