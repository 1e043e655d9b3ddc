"""Runs layers in Megatron's context for 8-bit training by Transformer Engine.

The recipes are Megatron's and Transformer Engine's. The context is entered at the same places as in Megatron's
``TransformerBlock`` (megatron/core/transformer/transformer_block.py:600): for delayed scaling once around all
layers, because leaving it updates the scales; for the other recipes around each layer.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from torch import nn

from megasched.layers.wrap import Forward, wrap_forward
from megasched.plan.plan import Plan

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig


def enter_fp8(model: nn.Module, plan: Plan, config: TransformerConfig, here: Callable[[str], bool]) -> None:
    """Wraps the layers for which ``here`` holds in Megatron's 8-bit context.

    Delayed scaling has its context around the whole pass (``fp8_pass``).

    The context is outside of recompute, which must know that it recomputes in 8 bits.
    """
    structure = plan.structure
    if not config.fp8 or config.fp8_recipe == "delayed" or structure is None:
        return
    for index in range(structure.count):
        path = structure.layer_path(index)
        if here(path):
            _enter_layer(model.get_submodule(path), config, index)


def _enter_layer(layer: nn.Module, config: TransformerConfig, index: int) -> None:
    from megatron.core.fp8_utils import get_fp8_context

    def entered(forward: Forward, /, *args: Any, **kwargs: Any) -> Any:
        with get_fp8_context(config, index):
            return forward(*args, **kwargs)

    wrap_forward(layer, entered)


def fp8_pass(config: TransformerConfig) -> AbstractContextManager[Any]:
    """Returns the context of delayed scaling for one forward of all layers on a stage; else a null context."""
    if not config.fp8 or config.fp8_recipe != "delayed":
        return nullcontext()
    from megatron.core.fp8_utils import get_fp8_context

    return get_fp8_context(config)
