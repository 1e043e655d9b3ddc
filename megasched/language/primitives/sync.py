"""Primitive ``sync``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from megasched.errors import Problem
from megasched.language.registry import Node, Primitive, register_primitive

MODES = ("fwd_pre", "fwd_post", "bwd_post")
OPS = ("all_reduce", "all_gather", "reduce_scatter", "scatter")


@register_primitive
class Sync(Primitive):
    """States what a module communicates over the tensor-parallel group.

    Parameters:
        mode: ``fwd_pre`` on the module's input, ``fwd_post`` on its output, ``bwd_post`` on the gradient of
            its input.
        op: ``all_reduce``, ``all_gather``, ``reduce_scatter`` or ``scatter``; or a function that takes and
            returns the tensor.

    It is never needed on a sharded module: column and row linears, vocabulary embeddings and sequence
    parallelism imply what must be sent, and that is derived. On them ``sync`` is a statement that is
    checked against the derivation; a contradiction is refused when the schedule is built. On any other
    module it is carried out as written (last dimension for gather and scatter). At ``bwd_post`` an operation
    that changes the gradient's shape does the reverse to the input in the forward: ``reduce_scatter``
    there gathers the input, ``all_gather`` cuts it, ``scatter`` gathers it.

    Example: ``sch["model.layers.*.mlp.down_proj"].sync("fwd_post", "all_reduce")``
    """

    name = "sync"
    one_call_in_graph = "unless sharded"  # the layer of a sharded module does what is asked

    def record(self, node: Node, mode: str, op: str | Callable[[Any], Any]) -> Mapping[str, Any]:
        return {"mode": mode, "op": op}

    def check(self, node: Node, arguments: Mapping[str, Any], source: str) -> list[Problem]:
        problems = []
        if arguments["mode"] not in MODES:
            remedy = f"one of {', '.join(MODES)}"
            problems.append(Problem(f"no sync mode {arguments['mode']!r}", node.path, source, remedy))
        if isinstance(arguments["op"], str) and arguments["op"] not in OPS:
            remedy = f"one of {', '.join(OPS)}, or a function"
            problems.append(Problem(f"no sync operation {arguments['op']!r}", node.path, source, remedy))
        return problems
