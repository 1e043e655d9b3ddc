"""Primitive ``adapt``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megasched.errors import Problem, ScheduleError
from megasched.language.records import caller_source
from megasched.language.registry import Node, Primitive, register_primitive


@register_primitive
class Adapt(Primitive):
    """Adds a LoRA adapter to a linear. Adapters alone are trained then, and what ``unfreeze`` names.

    Parameters:
        rank: of the two small matrices, ``lora_A.weight`` [rank, in] and ``lora_B.weight`` [out, rank].
        alpha: what they add is multiplied by alpha / rank. By default alpha is the rank.
        dropout: probability, on what ``lora_A`` reads.
        use_rslora: multiply by alpha / sqrt(rank) instead.

    ``lora_A`` starts as PEFT starts it, the same at every layout, and ``lora_B`` with zeros, so that the first
    step computes what the model computes. How they are cut follows from how the linear is.

    Example: ``sch["**.[qv]_proj"].adapt(rank=16, alpha=32, dropout=0.05)``, or ``sch.role("qkv.*").adapt(rank=8)``
    """

    name = "adapt"

    def record(
        self,
        node: Node,
        rank: int,
        alpha: float | None = None,
        dropout: float = 0.0,
        use_rslora: bool = False,
    ) -> Mapping[str, Any]:
        from torch import nn

        from megasched.definition.linears import is_conv1d

        what, remedy = "", ""
        before = [r for r in node.root.records if r.primitive == self.name and r.path == node.path]
        if not (isinstance(node.mod, nn.Linear) or is_conv1d(node.mod)):
            what = f"adapt takes a Linear or HF's Conv1D, and this is a {type(node.mod).__name__}"
            remedy = 'name linears inside it, e.g. sch["**.q_proj"], or sch.role("qkv.*")'
        elif isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
            what, remedy = f"adapt: rank {rank!r} is no positive whole number", "a rank such as 16"
        elif not 0 <= dropout < 1:
            what, remedy = f"adapt: dropout {dropout!r} is no probability below 1", "a dropout such as 0.05"
        elif before:
            what, remedy = f"is adapted twice: at {before[0].source}, and again", "remove one of the two calls"
        if what:
            raise ScheduleError(Problem(what, node.path, caller_source(), remedy))
        alpha = rank if alpha is None else alpha
        return {"rank": rank, "alpha": alpha, "dropout": dropout, "use_rslora": use_rslora}
