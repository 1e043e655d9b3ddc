"""Gives operations names that stay when other modules become calls: module path, operation, number in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx

# Live calls of a module's whole forward, by what was put around it; ``covered_by`` tells which module that is.
WRAPS = ("recompute", "fork_rng", "sync")


@dataclass(frozen=True)
class GraphNode:
    """Describes one operation of a traced module to a function that chooses among them.

    Attributes:
        name: its name, as ``find`` returns it: ``mlp.act_fn.silu``.
        op: ``call_module`` for a module that stays a call, ``call_function`` for an operator.
        target: path of that module, from the traced one; or the operator, e.g. ``torch.ops.aten.silu.default``.
        operation: name of the operator without types: ``silu``; ``call`` for a module.
        module: path, from the traced module, of the module whose code runs it; empty for the traced one.
        args: names of what it reads: operations, parameters and inputs; other values as they are.
    """

    name: str
    op: str
    target: Any
    operation: str
    module: str
    args: tuple[Any, ...]


def graph_nodes(names: Mapping[str, fx.Node], inputs: Mapping[str, fx.Node]) -> list[GraphNode]:
    """Returns a description of each operation of a graph, in their order."""
    known = {node: name for name, node in [*inputs.items(), *names.items()]}

    def described(name: str, node: fx.Node) -> GraphNode:
        live = "opaque" in node.meta
        args = fx.map_arg(node.args, lambda argument: known.get(argument, argument.name))
        module = name.rpartition(".")[0]
        op, target = ("call_module", name) if live else ("call_function", node.target)
        return GraphNode(name, op, target, operation(node), module, args)

    return [described(name, node) for name, node in names.items()]


def operation(node: fx.Node) -> str:
    """Returns the name of a node's operation without types and overloads: ``add`` for ``aten.add.Tensor``."""
    if "opaque" in node.meta:
        return "call"
    schema = getattr(node.target, "_schema", None)
    if schema is not None:
        return schema.name.rpartition("::")[2]
    return getattr(node.target, "__name__", str(node.target))


def name_nodes(graph: fx.Graph, root: str) -> dict[str, fx.Node]:
    """Returns all operations by name: ``mlp.act_fn.silu``, ``mul``, ``mul_1``.

    A live call has the name of the module that it calls (``mlp.up_proj``), or of what wraps it
    (``mlp.recompute``). fx counts an operation over the whole graph, so that one module kept as a call would
    rename later operations in all others; here it is counted per module.
    """
    counts: Counter[str] = Counter()
    names: dict[str, fx.Node] = {}
    for node in graph.nodes:
        if node.op in ("placeholder", "output", "get_attr"):
            continue
        module = _module(node, root)
        name = node.meta.get("opaque", operation(node))
        if "opaque" not in node.meta or name in WRAPS:
            name = ".".join(filter(None, [module, name]))
        counts[name] += 1
        names[f"{name}_{counts[name] - 1}" if counts[name] > 1 else name] = node
    return names


def covered_by(names: dict[str, fx.Node], path: str) -> str:
    """Returns the module that is one live call in this graph and contains ``path``; empty if none does."""
    for name, node in names.items():
        module = name.rpartition(".")[0] if node.meta.get("opaque") in WRAPS else name
        if "opaque" in node.meta and module and path.startswith(f"{module}."):
            return module
    return ""


def _module(node: fx.Node, root: str) -> str:
    """Returns the path, from the traced module, of the innermost module that the operation belongs to."""
    stack: dict[str, Any] = node.meta.get("nn_module_stack") or {}
    path = list(stack.values())[-1][0] if stack else ""
    return path.removeprefix(root).removeprefix(".").partition("@")[0]
