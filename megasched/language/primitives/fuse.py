"""Primitive ``fuse``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megasched.errors import Problem, ScheduleError
from megasched.language.primitives._subgraphs import check_edit, record_subgraph
from megasched.language.records import caller_source
from megasched.language.registry import Node, Primitive, register_primitive

if TYPE_CHECKING:
    from megasched.graph.subgraph import Subgraph


@register_primitive
class Fuse(Primitive):
    """Compiles a sub-graph of this traced module into one call.

    Parameters:
        subgraph: one that ``find`` returned.
        compiler: ``inductor`` (torch.compile), ``megatron`` (megatron-core's fused functions, for ready patterns),
            ``te`` (Transformer Engine), or one that is registered (``megasched.register_compiler``).

    Example: ``mlp.fuse(mlp.find(patterns.swiglu)[0], compiler="megatron")``
    """

    name = "fuse"

    def record(
        self, node: Node, subgraph: Subgraph | Mapping[str, Any], compiler: str = "inductor"
    ) -> Mapping[str, Any]:
        from megasched.graph.compilers import get_compiler
        from megasched.graph.subgraph import Subgraph

        data = record_subgraph(node, subgraph, "fuse", inlined=True)
        refused = get_compiler(compiler).refuse(Subgraph(node.path, **data))
        if refused:
            raise ScheduleError(Problem(f"fuse: {refused}", node.path, caller_source()))
        return {"subgraph": data, "compiler": compiler}

    def check(self, node: Node, arguments: Mapping[str, Any], source: str) -> list[Problem]:
        return check_edit(self.name, node, arguments, source)
