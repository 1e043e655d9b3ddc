"""Primitive ``replace``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from megasched.registry import Primitive, register_primitive

if TYPE_CHECKING:
    from torch import nn

    from megasched.schedule import Schedule


@register_primitive
class Replace(Primitive):
    """Puts another module in this module's place and carries the weights over.

    Parameters:
        factory: the new module, or a function that takes the old module and returns the new one.
        weights: new parameter name -> old parameter name, or -> a function of the dict of old tensors.
            Names that are equal on both sides need no entry. Every parameter of the new module must get a
            value and every parameter of the old one must be used; name one in ``drop`` to leave it behind.
        drop: old parameters that the new module has no use for.

    Hooks of both modules, ``requires_grad`` and annotations are kept. A module whose ``forward`` can't take
    the call that its parent makes is refused.

    Example: ``sch["model.norm"].replace(lambda old: torch.nn.RMSNorm(old.weight.shape[0], eps=1e-6))``
    """

    name = "replace"

    def record(
        self,
        node: Schedule,
        factory: nn.Module | Callable[[nn.Module], nn.Module],
        weights: Mapping[str, str | Callable[[dict[str, Any]], Any]] | None = None,
        drop: tuple[str, ...] = (),
    ) -> Mapping[str, Any]:
        return {"factory": factory, "weights": dict(weights or {}), "drop": tuple(drop)}
