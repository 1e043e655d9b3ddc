"""Stands in for Transformer Engine's grouped linears on a GPU: experts of Megatron's mixtures.

They keep, read and write what the kernels do; see ``kernels.py``. Every expert has as many tokens
(``even_routing.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megasched.planner.stand_ins.fake_kernels import add_product, product
from megasched.planner.stand_ins.kernels import EIGHT_BITS, quantize, weighted_swiglu


class _Grouped(torch.autograd.Function):
    """Stands in for Transformer Engine's ``GroupedLinear``: a linear for each expert."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, recipe: str | None, *weights: torch.Tensor) -> torch.Tensor:
        used, kept = (x, x) if recipe is None else quantize(x, recipe)
        ctx.save_for_backward(kept)
        ctx.weights, ctx.recipe = weights, recipe
        shape = (x.shape[0], weights[0].shape[0])
        return product(used, weights[0], shape, x.shape[1], x.dtype, batch=len(weights))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (kept,) = ctx.saved_tensors
        count, (tokens, features) = len(ctx.weights), gradient.shape
        used, again = (gradient, gradient) if ctx.recipe is None else quantize(gradient, ctx.recipe)
        of_input = product(used, ctx.weights[0], kept.shape, features, gradient.dtype, batch=count)
        add_product(again, kept, (count * features, kept.shape[1]), tokens // count, batch=count)
        return of_input, None, *(None for _ in ctx.weights)


def experts(
    mlps: Any, tokens: torch.Tensor, weights: torch.Tensor, recipe: str | None
) -> tuple[torch.Tensor, None]:
    """Stands in for ``SequentialMLP.forward`` of Megatron's moe/experts.py, and does as its ``TEGroupedMLP``.

    Args:
        recipe: recipe of weights that are in 8 bits.
    """
    config = mlps.config
    if config.moe_apply_probs_on_input:
        tokens, weights = (weights[:, None] * tokens).to(tokens.dtype), torch.ones_like(weights)
    first, second = (
        [getattr(expert, name).weight for expert in mlps.local_experts] for name in ("linear_fc1", "linear_fc2")
    )
    eight = recipe if getattr(first[0], EIGHT_BITS, False) else None
    hidden = _Grouped.apply(tokens, eight, *first)
    if config.gated_linear_unit:
        hidden = weighted_swiglu(hidden, weights[:, None])
    else:  # Megatron's fused kernel for this one has a flag of its own
        hidden = (config.activation_func(hidden) * weights[:, None]).to(hidden.dtype)
    return _Grouped.apply(hidden, eight, *second), None


def stand_ins(recipe: str | None) -> dict[str, Callable[..., Any]]:
    """Maps each target to the function that stands in its place.

    Args:
        recipe: recipe of 8-bit training, as Megatron's ``--fp8-recipe`` names it.
    """

    def grouped(mlps: Any, tokens: torch.Tensor, counts: Any, weights: torch.Tensor) -> Any:
        return experts(mlps, tokens, weights, recipe)

    return {"megatron.core.transformer.moe.experts:SequentialMLP.forward": grouped}
