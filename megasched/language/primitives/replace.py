"""Primitive ``replace``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from megasched.errors import Problem, ScheduleError
from megasched.language.primitives._subgraphs import check_edit, record_subgraph
from megasched.language.records import caller_source
from megasched.language.registry import Node, Primitive, register_primitive

if TYPE_CHECKING:
    from torch import nn

    from megasched.graph.subgraph import Subgraph


@register_primitive
class Replace(Primitive):
    """Puts another module in this module's place and carries the weights over.

    Parameters:
        factory: the new module, or a function that takes the old module and returns the new one.
        weights: new parameter name -> old parameter name, or -> a function of the mapping of old tensors.
            Names that are equal on both sides need no entry, nor do parameters that the new module holds
            already because it wraps the old one. Every parameter of the new module must get a value, and every
            parameter and persistent buffer of the old one must be used.
        drop: old parameters and persistent buffers that the new module has no use for.
        subgraph: of a traced module, as ``find`` returns it: only these operations are replaced. The factory is
            a module without parameters, or gets the operations as a module and returns what to call instead; that
            takes ``subgraph.inputs`` in their order, the parameters among them as tensors.

    Persistent buffers of equal names are carried; hooks of both modules, ``requires_grad``, ties and annotations
    are kept. A module whose ``forward`` can't take the call that its parent makes is refused.

    Example: ``sch["model.norm"].replace(lambda old: torch.nn.RMSNorm(old.weight.shape[0], eps=1e-6))``
    """

    name = "replace"

    def record(
        self,
        node: Node,
        factory: nn.Module | Callable[[nn.Module], nn.Module],
        weights: Mapping[str, str | Callable[[dict[str, Any]], Any]] | None = None,
        drop: tuple[str, ...] = (),
        subgraph: Subgraph | Mapping[str, Any] | None = None,
    ) -> Mapping[str, Any]:
        if subgraph is not None:
            if weights or drop:
                what = "replace: a sub-graph has no weights of its own: it takes them as inputs"
                raise ScheduleError(Problem(what, node.path, caller_source(), "leave weights and drop out"))
            return {"factory": factory, "subgraph": record_subgraph(node, subgraph, "replace")}
        return {"factory": factory, "weights": dict(weights or {}), "drop": tuple(drop)}

    def check(self, node: Node, arguments: Mapping[str, Any], source: str) -> list[Problem]:
        return check_edit(self.name, node, arguments, source)
