"""Primitive ``replace``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from megasched.registry import Node, Primitive, register_primitive

if TYPE_CHECKING:
    from torch import nn


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
    ) -> Mapping[str, Any]:
        return {"factory": factory, "weights": dict(weights or {}), "drop": tuple(drop)}
