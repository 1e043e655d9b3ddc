"""Primitive ``fork_rng``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megasched.language.registry import Node, Primitive, register_primitive


@register_primitive
class ForkRng(Primitive):
    """Draws this module's random numbers (dropout) from Megatron's model-parallel RNG state.

    Ranks of one TP group then draw different numbers, as they must where an activation is sharded.
    ``nn.Dropout`` modules on sharded activations, attention dropout and, under sequence parallelism,
    whole layers get this by themselves; call it for modules that draw in some other way.

    Example: ``sch["model.layers.*.mlp"].fork_rng()``
    """

    name = "fork_rng"
    acts_on_calls = True
    one_call_in_graph = "always"

    def record(self, node: Node) -> Mapping[str, Any]:
        return {}
