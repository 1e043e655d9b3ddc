"""Primitive ``level``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megasched.errors import Problem
from megasched.language.registry import Node, Primitive, register_primitive

LEVELS = ("leaf", "fused", "block")


@register_primitive
class Level(Primitive):
    """Chooses how much of this module, and of all in it, is computed at once; the innermost call counts.

    Parameters:
        name: ``leaf`` runs each linear on its own, as the definition does. ``fused``, which is the default,
            computes column-sharded linears that read the same tensor (q, k and v; gate and up) by one matrix
            product, and RMS norms by torch's one kernel. ``block`` has a whole decoder layer computed by
            Megatron's ``TransformerLayer``, for architectures whose layer is known to be the same. Checkpoints
            keep HF's names at all of them.
        required: where Megatron's layer can't stand for this one, the schedule is refused; otherwise the layer is
            at ``fused`` then, and ``megasched show`` says why. A required call on a module around it counts more.
        because: why this level was taken, for ``megasched show``.

    Example: ``sch["model.layers.0"].level("leaf")``
    """

    name = "level"
    phase = "plan"
    keeps_product = True
    inside_megatron_module = True

    def record(self, node: Node, name: str, *, required: bool = True, because: str = "") -> Mapping[str, Any]:
        said = {"required": required, "because": because}
        return {"name": name} | {key: value for key, value in said.items() if value not in (True, "")}

    def check(self, node: Node, arguments: Mapping[str, Any], source: str) -> list[Problem]:
        name = arguments["name"]
        if name in LEVELS:
            return []
        return [Problem(f"no level {name!r}", node.path, source, f"one of {', '.join(LEVELS)}")]
