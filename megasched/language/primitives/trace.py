"""Primitive ``trace``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megasched.errors import Problem
from megasched.language.registry import Node, Primitive, register_primitive

if TYPE_CHECKING:
    import torch
    from torch import nn


@register_primitive
class Trace(Primitive):
    """Makes a static graph of this one module, for ``find``, ``fuse``, and partial ``replace`` and ``checkpoint``.

    Parameters:
        leaves: submodules that stay calls: paths below this module, globs, regular expressions, or classes.
        flatten: look into submodules; otherwise each child stays a call.
        inputs: example tensors by parameter, for a module that a trial call of the model does not reach.

    Linears, embeddings and attention always stay calls, of what stands there when the model runs. Paths,
    parameter names and state-dict keys stay. A module that can't be traced is refused at this line.

    Example: ``sch["model.layers.0.mlp"].trace()``
    """

    name = "trace"

    def record(
        self,
        node: Node,
        leaves: Sequence[str | type[nn.Module]] = (),
        flatten: bool = True,
        inputs: Mapping[str, torch.Tensor] | None = None,
    ) -> Mapping[str, Any]:
        from megasched.graph.definition_graphs import chosen_leaves, shapes_of, standing_leaves, trial_of

        chosen = set(chosen_leaves(node.mod, leaves, node.path))
        if not flatten:
            chosen |= {name for name, _ in node.mod.named_children()}
        shapes = shapes_of(inputs)
        trial_of(node).trace(node.path, frozenset(chosen | standing_leaves(node.mod)), shapes)
        return {"leaves": tuple(sorted(chosen)), "flatten": flatten, "inputs": shapes}

    def check(self, node: Node, arguments: Mapping[str, Any], source: str) -> list[Problem]:
        return check_traces(node, arguments, source)


def check_traces(node: Node, arguments: Mapping[str, Any], source: str) -> list[Problem]:
    """A module is traced once, by itself, and on one pipeline stage."""
    prefix = node.path + "." if node.path else ""
    others = [r for r in node.root.records if r.primitive in ("trace", "trace_until")]
    if sum(record.path == node.path for record in others) > 1:
        first = next(record for record in others if record.path == node.path)
        if first.source != source or first.arguments != arguments:
            return [Problem(f"is traced twice: at {first.source}, and again", node.path, source, "remove one")]
    for record in others:
        inner = record.path.removeprefix(prefix)
        if record.path == node.path or not record.path.startswith(prefix):
            continue
        if not any(inner == leaf or inner.startswith(leaf + ".") for leaf in arguments["leaves"]):
            remedy = f'trace one of the two, or keep the inner a call: leaves=["{inner}"]'
            return [Problem(f"is traced, and so is {record.path} inside it", node.path, source, remedy)]
    layout = node.root.layout
    if layout.pp > 1 and not any(part.isdigit() for part in node.path.split(".")):
        what = f"holds layers of several pipeline stages ({layout.pp}), and a graph can't be cut"
        return [Problem(what, node.path, source, "trace the layers, or modules in them")]
    return []
