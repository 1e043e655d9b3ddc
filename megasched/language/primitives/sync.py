"""Primitive ``sync``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from megasched.errors import Problem, ScheduleError
from megasched.language.records import caller_source
from megasched.language.registry import Node, Primitive, register_primitive
from megasched.language.signatures import takes

# Mode -> the arguments of torch's hooks there, in the place of a function of the tensor.
MODES = {
    "fwd_pre": ("module", "inputs"),
    "fwd_post": ("module", "inputs", "output"),
    "bwd_post": ("module", "grad_input", "grad_output"),
}
OPS = ("all_reduce", "all_gather", "reduce_scatter", "scatter")
ALONG_AN_AXIS = OPS[1:]


@register_primitive
class Sync(Primitive):
    """States what a module communicates over the tensor-parallel group.

    Parameters:
        mode: ``fwd_pre`` on the module's input, ``fwd_post`` on its output, ``bwd_post`` on the gradient of
            its input.
        op: ``all_reduce``, ``all_gather``, ``reduce_scatter`` or ``scatter``; a function that takes and
            returns the tensor; or one with the arguments of torch's hooks: (module, inputs) at ``fwd_pre``,
            (module, inputs, output) at ``fwd_post``, (module, grad_input, grad_output) at ``bwd_post``.
        axis: dimension of the tensor that is gathered or cut; the last one by default.
        sync_op_or_fn: another name of ``op``, which is Slapo's.
        tensor_parallel_output_grad: False, as Slapo spells that the gradient of a gathered tensor is whole on each
            rank. It always is here.

    It is never needed on a sharded module: column and row linears, vocabulary embeddings and sequence
    parallelism imply what must be sent, and that is derived. On them ``sync`` is a statement that is
    checked against the derivation, its axis too; a contradiction is refused when the schedule is built. On a
    module with sharded ones in it a sum is refused, as they have summed. On any other module it is carried out as
    written, where there are several ranks. At ``bwd_post`` an operation
    that changes the gradient's shape does the reverse to the input in the forward: ``reduce_scatter``
    there gathers the input, ``all_gather`` cuts it, ``scatter`` gathers it.

    Example: ``sch["model.layers.*.mlp.down_proj"].sync("fwd_post", "all_reduce")``
    """

    name = "sync"
    of_weights = True
    acts_on_calls = True
    one_call_in_graph = "unless sharded"  # the layer of a sharded module does what is asked

    def record(
        self,
        node: Node,
        mode: str,
        op: str | Callable[..., Any] | None = None,
        axis: int | None = None,
        *,
        sync_op_or_fn: str | Callable[..., Any] | None = None,
        tensor_parallel_output_grad: bool = False,
    ) -> Mapping[str, Any]:
        what, remedy = "", ""
        asked = op if sync_op_or_fn is None else sync_op_or_fn
        if asked is None or (op is not None and sync_op_or_fn is not None):
            what = "takes one operation, as op or as sync_op_or_fn"
            remedy = f"one of {', '.join(OPS)}, or a function"
        elif sync_op_or_fn in ALONG_AN_AXIS and axis is None:
            what = f"sync_op_or_fn={sync_op_or_fn!r} without an axis: Slapo takes axis 0, megasched the last"
            remedy = "say which you mean, e.g. axis=-1"
        elif tensor_parallel_output_grad:
            what = "tensor_parallel_output_grad=True sums over the ranks what is summed already: here each module "
            what += "behind sums the gradient of its own input"
            remedy = "leave it out"
        if what:
            raise ScheduleError(Problem(f"sync: {what}", node.path, caller_source(), remedy))
        return {"mode": mode, "op": asked} | ({} if axis is None else {"axis": axis})

    def check(self, node: Node, arguments: Mapping[str, Any], source: str) -> list[Problem]:
        mode, op, problems = arguments["mode"], arguments["op"], []

        def refuse(what: str, remedy: str) -> None:
            problems.append(Problem(what, node.path, source, remedy))

        if mode not in MODES:
            refuse(f"no sync mode {mode!r}", f"one of {', '.join(MODES)}")
        elif callable(op) and not takes(op, 1) and not takes(op, len(MODES[mode])):
            name = getattr(op, "__qualname__", repr(op))
            hook = ", ".join(MODES[mode])
            refuse(f"sync: {name} can't be called at {mode}", f"a function of the tensor, or of ({hook})")
        if isinstance(op, str) and "->" in op:
            remedy = (
                "scatter (to S) or all_gather (to R), with axis=-1 for the second letter and axis=-2 for the first"
            )
            refuse(f"no sync operation {op!r}", remedy)
        elif isinstance(op, str) and op not in OPS:
            refuse(f"no sync operation {op!r}", f"one of {', '.join(OPS)}, or a function")
        elif "axis" in arguments and op not in ALONG_AN_AXIS:
            refuse(f"sync: {op if isinstance(op, str) else 'a function'} has no axis", "leave axis out")
        return problems


def is_hook(mode: str, op: Callable[..., Any]) -> bool:
    """Returns whether a function of ``sync`` has the arguments of torch's hooks, rather than the tensor's."""
    return not takes(op, 1) and takes(op, len(MODES[mode]))
