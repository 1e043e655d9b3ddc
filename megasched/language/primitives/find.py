"""Primitive ``find``."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from megasched.errors import Problem, ScheduleError
from megasched.language.records import caller_source
from megasched.language.registry import Node, Primitive, register_primitive

if TYPE_CHECKING:
    import torch
    from torch import nn

    from megasched.graph.pattern import Pattern
    from megasched.graph.subgraph import Subgraph


@register_primitive
class Find(Primitive):
    """Sub-graphs of a traced module that match, as a list; it leaves no record.

    Parameters:
        what: a regular expression that matches whole names of operations (each its own sub-graph; join them
            with ``|``); or a pattern: a function of tensors, a module, or one of ``megasched.graph.patterns``.
        missing_ok: return an empty list where nothing matches, which is an error otherwise.
        examples: parameter of a pattern -> shape of an example, where [b, s, h] does not fit.

    Example: ``sch["model.layers.0.mlp"].find(patterns.swiglu)``
    """

    name = "find"
    leaves_record = False

    def record(
        self,
        node: Node,
        what: str | Callable[..., torch.Tensor] | nn.Module | Pattern,
        missing_ok: bool = False,
        examples: Mapping[str, Any] | None = None,
    ) -> list[Subgraph]:  # type: ignore[override]
        from megasched.graph.definition_graphs import graph_of
        from megasched.graph.pattern import as_pattern
        from megasched.graph.subgraph import Subgraph

        graph = graph_of(node)
        if isinstance(what, str):
            try:
                found = [Subgraph(node.path, (name,)) for name in graph.names if re.fullmatch(what, name)]
            except re.error as error:
                problem = Problem(f"find: {what!r} is no regular expression: {error}", node.path, caller_source())
                raise ScheduleError(problem) from error
            title = repr(what)
        else:
            pattern = as_pattern(what, examples)
            found, title = pattern.find(graph, node.path), pattern.name or "the pattern"
        if not found and not missing_ok:
            near = difflib.get_close_matches(what, graph.names, n=3) if isinstance(what, str) else []
            hint = f"did you mean {' or '.join(near)}? " if near else ""
            remedy = f"{hint}its operations are: {', '.join(graph.names)}"
            raise ScheduleError(Problem(f"find: nothing matches {title}", node.path, caller_source(), remedy))
        return found
