"""Primitive ``checkpoint``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megasched.errors import Problem, ScheduleError
from megasched.language.records import caller_source
from megasched.language.registry import Node, Primitive, record_subgraph, register_primitive
from megasched.language.subgraph import Subgraph


@register_primitive
class Checkpoint(Primitive):
    """Recomputes this module's activations in the backward pass instead of keeping them.

    Random numbers are drawn again as they were, from the default generator, from Megatron's model-parallel one,
    from Python's and numpy's. What the module's code keeps from call to call, moving averages in buffers and
    counters in attributes, is as if it had run once. Keyword arguments arrive by name; paths and state-dict keys
    do not change; a module that is fed integer ids alone still gets its gradients.

    Parameters:
        subgraph: of a traced module, as ``find`` returns it: only these operations are computed again.
        order_args_fn: function of the module's arguments that returns them all by position, as Slapo needs it.
            Here arguments arrive as the parent gives them; what the function returns is compared with them at each
            call, and one that loses or changes an argument is refused.

    Example: ``sch["model.layers"][::2].checkpoint()`` recomputes every second layer.
    """

    name = "checkpoint"
    acts_on_calls = True
    one_call_in_graph = "always"
    takes_subgraph = True
    runs_code_again = True
    shown_by_effect = True

    def record(
        self,
        node: Node,
        subgraph: Subgraph | Sequence[Subgraph] | Mapping[str, Any] | None = None,
        *,
        order_args_fn: Callable[..., Sequence[Any]] | None = None,
    ) -> Mapping[str, Any]:
        if subgraph is None:
            return {} if order_args_fn is None else {"order_args_fn": order_args_fn}
        if order_args_fn is not None:
            what = "checkpoint: a sub-graph has no arguments to order: it reads what its operations do"
            raise ScheduleError(Problem(what, node.path, caller_source(), "leave order_args_fn out"))
        return {"subgraph": record_subgraph(self, node, subgraph)}
