"""Primitives ``adapt`` and ``unfreeze``: LoRA adapters, and what is trained beside them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megasched.errors import Problem, ScheduleError
from megasched.language.lora import is_linear_class
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
    phase = "edit"
    of_definition = True
    keeps_product = True
    one_call_in_graph = "always"
    chooses_trained = True

    def record(
        self,
        node: Node,
        rank: int,
        alpha: float | None = None,
        dropout: float = 0.0,
        use_rslora: bool = False,
    ) -> Mapping[str, Any]:
        what, remedy = "", ""
        before = [r for r in node.root.records if r.primitive == self.name and r.path == node.path]
        if not is_linear_class(node.mod):
            what = f"adapt takes a Linear or HF's Conv1D, and this is a {type(node.mod).__name__}"
            remedy = 'name linears inside it, e.g. sch["**.q_proj"], or sch.role("qkv.*")'
        elif rank < 1:
            what, remedy = f"adapt: rank {rank!r} is no positive whole number", "a rank such as 16"
        elif not 0 <= dropout < 1:
            what, remedy = f"adapt: dropout {dropout!r} is no probability below 1", "a dropout such as 0.05"
        elif before:
            what, remedy = f"is adapted twice: at {before[0].source}, and again", "remove one of the two calls"
        if what:
            raise ScheduleError(Problem(what, node.path, caller_source(), remedy))
        alpha = rank if alpha is None else alpha
        return {"rank": rank, "alpha": alpha, "dropout": dropout, "use_rslora": use_rslora}


@register_primitive
class Unfreeze(Primitive):
    """Trains the parameters of a module beside the adapters (PEFT's ``modules_to_save``): a head, a norm.

    ``adapt`` freezes everything else. What is in the module is trained with it.

    Example: ``sch["lm_head"].unfreeze()``
    """

    name = "unfreeze"
    phase = "edit"
    of_definition = True
    keeps_product = True
    chooses_trained = True

    def record(self, node: Node) -> Mapping[str, Any]:
        return {}

    def check(self, node: Node, arguments: Mapping[str, Any], source: str) -> list[Problem]:
        if next(node.mod.parameters(), None) is None:
            return [Problem("unfreeze: the module has no parameters", node.path, source)]
        if any(record.primitive == "adapt" for record in node.root.records):
            return []
        what = "unfreeze: nothing is frozen, because no linear is adapted"
        return [Problem(what, node.path, source, "leave the call out, or adapt linears")]
