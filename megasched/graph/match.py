"""Finds a pattern in a graph: the same operations on the same operands, however they are written."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx
from torch.utils._pytree import tree_leaves

from megasched.graph.capture import Graph
from megasched.graph.naming import operation
from megasched.graph.partition import CASTS, is_idle_cast, uncast
from megasched.language.subgraph import Subgraph

_COMMUTE = ("add", "mul")
# Sizes in patterns' examples are at least this; a size there stands for any, equal ones for equal ones.
# Smaller integers (axes, powers, numbers of parts) stand for themselves, and so do those that the code writes.
SMALLEST_SIZE = 11
_LARGEST_SIZE = 1 << 32
# What an example of a number is; a number in the graph of a pattern that is this one stands for any.
ANY_NUMBER = 0.001234567


@dataclass(frozen=True)
class _Found:
    """Holds the state of a partial match.

    Attributes:
        written: numbers that the pattern's code writes, which are no sizes.
    """

    written: frozenset[int] = frozenset()
    nodes: dict[fx.Node, fx.Node] = field(default_factory=dict)
    casts: frozenset[fx.Node] = frozenset()
    sizes: dict[int, int] = field(default_factory=dict)
    number: float | None = None

    def with_node(self, pattern: fx.Node, target: fx.Node) -> _Found:
        return replace(self, nodes={**self.nodes, pattern: target})


def sizes_in(pattern: Graph) -> list[int]:
    """Returns the numbers in a pattern that may be sizes of its examples, in the order of its operations."""
    leaves = (leaf for node in pattern.module.graph.nodes for leaf in tree_leaves((node.args, node.kwargs)))
    return [leaf for leaf in leaves if type(leaf) is int and SMALLEST_SIZE <= leaf < _LARGEST_SIZE]


def find_matches(
    pattern: Graph, graph: Graph, path: str, title: str, scalar: str = "", written: frozenset[int] = frozenset()
) -> list[Subgraph]:
    """Returns every part of ``graph`` that matches ``pattern``, without overlaps, in the order of the graph.

    Args:
        path: path of the traced module, stored in the results.
        title: name of the pattern, stored in the results.
        scalar: name of the number that the pattern leaves open.
        written: numbers that the pattern's code writes, however large.
    """
    (last,) = _results(pattern)
    names = {node: name for name, node in [*graph.inputs.items(), *graph.names.items()]}
    taken: set[fx.Node] = set()
    found: list[Subgraph] = []
    for end in reversed(list(graph.names.values())):
        for match in _unify(last, end, _Found(written), names):
            members = {target for node, target in match.nodes.items() if node.op != "placeholder"} | match.casts
            read = [match.nodes[node] for node in pattern.inputs.values() if node in match.nodes]
            # An idle cast is what it casts: in a trace, whoever reads that after the cast reads the cast.
            inputs = [uncast(node) if node in members else node for node in read]
            top = match.nodes[_skip(last)[0]]
            if members & taken or members & set(inputs) or _used_outside(members, top):
                continue
            taken |= members
            nodes = tuple(name for name, node in graph.names.items() if node in members)
            scalars = {scalar: match.number} if scalar and match.number is not None else {}
            found.append(Subgraph(path, nodes, tuple(names[node] for node in inputs), title, scalars))
            break
    return found[::-1]


def returns_operation(pattern: Graph) -> bool:
    """Returns whether a pattern returns one tensor, and an operation gives it; type conversions are none."""
    results = _results(pattern)
    return len(results) == 1 and _skip(results[0])[0].op == "call_function"


def _results(graph: Graph) -> list[fx.Node]:
    """Returns the tensors that a graph returns, in their order."""
    return list(graph.module.graph.output_node().all_input_nodes)


def _used_outside(members: set[fx.Node], top: fx.Node) -> bool:
    """Returns whether an intermediate value is also used elsewhere."""
    return any(
        user not in members
        for node in members
        if node is not top and not is_idle_cast(node)
        for user in node.users
    )


def _skip(node: fx.Node) -> tuple[fx.Node, frozenset[fx.Node]]:
    """Returns the node before any type conversions, and those conversions."""
    casts = []
    while node.target in CASTS and isinstance(node.args[0], fx.Node):
        casts.append(node)
        node = node.args[0]
    return node, frozenset(casts)


def _unify(pattern: fx.Node, target: fx.Node, found: _Found, names: dict[fx.Node, str]) -> Iterator[_Found]:
    inner, skipped = _skip(pattern)
    if inner.op == "placeholder" and not skipped:
        if found.nodes.get(inner, target) is target:
            yield found.with_node(inner, target)
        return
    before, casts = _skip(target)
    if inner in found.nodes:
        if found.nodes[inner] is before:
            yield replace(found, casts=found.casts | casts)
        return
    if inner.op == "placeholder":
        yield replace(found.with_node(inner, before), casts=found.casts | casts)
        return
    if before.op != "call_function" or not _same_operation(inner, before, names):
        return
    found = replace(found.with_node(inner, before), casts=found.casts | casts)
    mine, theirs = _operands(inner), _operands(before)
    if "opaque" in inner.meta:  # a wildcard says which tensors go in, not with which options
        theirs = [operand for operand in theirs if isinstance(operand, fx.Node)]
    yield from _unify_all(mine, theirs, found, names)
    if operation(inner) in _COMMUTE and len(mine) > 1 and all(one == 1 for one in mine[2:]):  # alpha of a sum
        yield from _unify_all(mine, [theirs[1], theirs[0], *theirs[2:]], found, names)


def _same_operation(pattern: fx.Node, target: fx.Node, names: dict[fx.Node, str]) -> bool:
    wanted = pattern.meta.get("opaque")
    if wanted is not None:
        return re.fullmatch(wanted.removeprefix("?"), names[target]) is not None
    return operation(pattern) == operation(target)


def _operands(node: fx.Node) -> list[Any]:
    """Returns the arguments in the order of the operation's schema, defaults included."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return list(node.args)
    rest = schema.arguments[len(node.args) :]
    return [*node.args, *(node.kwargs.get(argument.name, argument.default_value) for argument in rest)]


def _unify_all(
    mine: Sequence[Any], theirs: Sequence[Any], found: _Found, names: dict[fx.Node, str]
) -> Iterator[_Found]:
    if len(mine) != len(theirs):
        return
    if not mine:
        yield found
        return
    for step in _unify_value(mine[0], theirs[0], found, names):
        yield from _unify_all(mine[1:], theirs[1:], step, names)


def _unify_value(mine: Any, theirs: Any, found: _Found, names: dict[fx.Node, str]) -> Iterator[_Found]:
    if isinstance(mine, fx.Node):
        if isinstance(theirs, fx.Node):
            yield from _unify(mine, theirs, found, names)
    elif isinstance(mine, list | tuple):
        if isinstance(theirs, list | tuple):
            yield from _unify_all(mine, theirs, found, names)
    elif isinstance(mine, bool | str | None) or isinstance(theirs, bool | str | None):
        if mine == theirs and type(mine) is type(theirs):
            yield found
    elif isinstance(mine, int | float) and isinstance(theirs, int | float):
        yield from _unify_number(mine, theirs, found)
    elif mine == theirs:
        yield found


def _unify_number(mine: float, theirs: float, found: _Found) -> Iterator[_Found]:
    if mine == ANY_NUMBER:
        if found.number in (None, theirs):
            yield replace(found, number=float(theirs))
    elif isinstance(mine, int) and SMALLEST_SIZE <= mine < _LARGEST_SIZE and mine not in found.written:
        if isinstance(theirs, int) and found.sizes.get(mine, theirs) == theirs:
            yield replace(found, sizes={**found.sizes, mine: theirs})
    elif math.isclose(mine, theirs, rel_tol=1e-6):
        yield found
