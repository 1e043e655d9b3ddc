"""Primitive ``trace_until``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from megasched.errors import Problem
from megasched.language.primitives.trace import check_traces
from megasched.language.registry import Node, Primitive, register_primitive

if TYPE_CHECKING:
    import torch
    from torch import nn


@register_primitive
class TraceUntil(Primitive):
    """Makes a static graph of this module down to the modules named, which stay calls.

    Parameters:
        where: path or glob below this module, or a function of (path, module); the outermost that match count.
        inputs: as in ``trace``.

    Example: ``sch["model"].trace_until("layers.*")`` shows how a model calls its layers.
    """

    name = "trace_until"

    def record(
        self,
        node: Node,
        where: str | Callable[[str, nn.Module], bool] | None = None,
        inputs: Mapping[str, torch.Tensor] | None = None,
        leaves: tuple[str, ...] = (),
    ) -> Mapping[str, Any]:
        from megasched.graph.definition_graphs import reached, shapes_of, standing_leaves, trial_of

        # A record keeps what was reached, so that a function need not be saved.
        chosen = leaves if where is None else reached(node.mod, where, node.path)
        shapes = shapes_of(inputs)
        trial_of(node).trace(node.path, frozenset({*chosen, *standing_leaves(node.mod)}), shapes)
        return {"leaves": tuple(chosen), "inputs": shapes}

    def check(self, node: Node, arguments: Mapping[str, Any], source: str) -> list[Problem]:
        return check_traces(node, arguments, source)
