"""Primitive ``decompose``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megasched.errors import Problem, ScheduleError
from megasched.language.records import caller_source
from megasched.language.registry import Node, Primitive, register_primitive


@register_primitive
class Decompose(Primitive):
    """Shows a linear as product and bias in the graph around it, so that a pattern can take the bias in.

    Call it before ``trace`` on a module around it. It composes with ``shard``: the bias of a column is the local
    one; that of a row is added after the reduction. A linear without bias is its product alone.

    Example: ``sch["transformer.h.0.mlp.c_fc"].decompose()``
    """

    name = "decompose"

    def record(self, node: Node) -> Mapping[str, Any]:
        from torch import nn

        from megasched.definition.linears import is_conv1d
        from megasched.graph.definition_graphs import trial_of

        if not (isinstance(node.mod, nn.Linear) or is_conv1d(node.mod)):
            what = f"decompose takes a Linear, and this is a {type(node.mod).__name__}"
            raise ScheduleError(Problem(what, node.path, caller_source()))
        trial = trial_of(node)
        around = [path for path in trial.graphs if node.path.startswith(path + ".") or not path]
        if around:
            remedy = "call decompose before trace"
            raise ScheduleError(Problem(f"{around[0]} is traced already", node.path, caller_source(), remedy))
        trial.decomposed.add(node.path)
        return {}

    def check(self, node: Node, arguments: Mapping[str, Any], source: str) -> list[Problem]:
        for record in node.root.records:
            prefix = record.path + "." if record.path else ""
            if record.primitive in ("trace", "trace_until") and node.path.startswith(prefix):
                inner = node.path.removeprefix(prefix)
                if not any(inner == leaf or inner.startswith(leaf + ".") for leaf in record.arguments["leaves"]):
                    return []
        return [Problem("decompose: no traced module shows this linear", node.path, source, "trace one around it")]
