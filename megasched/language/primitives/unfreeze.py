"""Primitive ``unfreeze``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megasched.errors import Problem
from megasched.language.registry import Node, Primitive, register_primitive


@register_primitive
class Unfreeze(Primitive):
    """Trains the parameters of a module beside the adapters (PEFT's ``modules_to_save``): a head, a norm.

    ``adapt`` freezes everything else. What is in the module is trained with it.

    Example: ``sch["lm_head"].unfreeze()``
    """

    name = "unfreeze"

    def record(self, node: Node) -> Mapping[str, Any]:
        return {}

    def check(self, node: Node, arguments: Mapping[str, Any], source: str) -> list[Problem]:
        if next(node.mod.parameters(), None) is None:
            return [Problem("unfreeze: the module has no parameters", node.path, source)]
        if any(record.primitive == "adapt" for record in node.root.records):
            return []
        what = "unfreeze: nothing is frozen, because no linear is adapted"
        return [Problem(what, node.path, source, "leave the call out, or adapt linears")]
