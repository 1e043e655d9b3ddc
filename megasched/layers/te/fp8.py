"""8-bit training by Transformer Engine: Megatron's context around the layers.

The recipes and what they do are Megatron's and Transformer Engine's. A context is entered where Megatron's
``TransformerBlock`` enters it (megatron/core/transformer/transformer_block.py:600): for delayed scaling once
around all layers, because leaving it updates the scales; for the other recipes around each layer.
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
    """Puts Megatron's 8-bit context around the layers for which ``here`` holds; delayed scaling has it around the
    whole pass (``fp8_pass``).

    It stands outside of recompute, which must know that it recomputes in 8 bits.
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

    def wrapper(forward: Forward) -> Forward:
        def entered(*args: Any, **kwargs: Any) -> Any:
            with get_fp8_context(config, index):
                return forward(*args, **kwargs)

        return entered

    wrap_forward(layer, wrapper)


def fp8_pass(config: TransformerConfig) -> AbstractContextManager[Any]:
    """Around one forward pass of all layers on a stage: the context of delayed scaling."""
    if not config.fp8 or config.fp8_recipe != "delayed":
        return nullcontext()
    from megatron.core.fp8_utils import get_fp8_context

    return get_fp8_context(config)
