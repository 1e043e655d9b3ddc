"""Primitive ``checkpoint``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megasched.registry import Node, Primitive, register_primitive


@register_primitive
class Checkpoint(Primitive):
    """Recomputes this module's activations in the backward pass instead of keeping them.

    Random numbers are drawn again as they were, from the default generator and from Megatron's
    model-parallel one. Keyword arguments arrive by name; paths and state-dict keys do not change; a module
    that is fed integer ids alone still gets its gradients.

    Example: ``sch["model.layers"][::2].checkpoint()`` recomputes every second layer.
    """

    name = "checkpoint"

    def record(self, node: Node) -> Mapping[str, Any]:
        return {}
