"""Computes experts of transformers with fewer, smaller tensors than their grouped form makes.

That form (``grouped_mm_experts_forward`` in transformers/integrations/moe.py) weighs what the last products make,
[pairs, h], where a pair is a token and one of its experts; often in float32, and with a copy for each step.
Products are linear, so their inputs are weighed here, as Megatron does (``TEGroupedMLP`` in
megatron/core/transformer/moe/experts.py): by the kernel that computes the gate.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from megasched.definition.expert_trials import computes_as
from megasched.definition.experts import MARKER, has_form
from megasched.definition.instances import is_of_transformers
from megasched.layers.fused.kernels import one_kernel
from megasched.layers.fused.pairs import by_expert, in_order
from megasched.layers.wrap import Forward, wrap_forward
from megasched.transformers_names import EXPERTS

_GATE = "_apply_gate"


def fuse_experts(model: nn.Module, here: Callable[[str], bool]) -> None:
    """Replaces the forward of experts at the paths for which ``here`` holds, or compiles their gate; modules stay.

    An instance that has a method of its own keeps it.
    """
    for path, module in model.named_modules():
        if not here(path) or not is_of_transformers(module, _GATE) or _GATE in vars(module):
            continue
        if _can_weigh_inputs(module):
            wrap_forward(module, partial(_grouped, module))
        else:
            setattr(module, _GATE, partial(apply_gate, module))


def _can_weigh_inputs(module: Any) -> bool:
    """Returns whether experts run in the grouped form, and compute what ``grouped_experts`` does."""
    if "forward" in vars(module) or not is_of_transformers(module) or not hasattr(module, MARKER):
        return False
    if not has_form(module):
        return False
    grouped = getattr(module.config, EXPERTS, None) == "grouped_mm"
    last = module.has_bias or getattr(module, "has_post_expert_norm", False)  # what comes after the last products
    return grouped and not last and computes_as(module, grouped_experts)


def _grouped(module: nn.Module, forward: Forward, /, *args: Any, **kwargs: Any) -> torch.Tensor:
    return grouped_experts(module, *args, **kwargs)


def apply_gate(module: nn.Module, gate_up: torch.Tensor) -> torch.Tensor:
    """Maps what experts' first products make, [pairs, 2 f], to what their last ones read, [pairs, f]."""
    return one_kernel(getattr(type(module), _GATE))(module, gate_up)


def grouped_experts(module: Any, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Returns each token's weighted sum of what its experts compute, [t, h].

    Args:
        module: experts in HF's form.
        hidden: [t, h].
        index: [t, k], the experts of each token.
        weights: [t, k].
    """
    from transformers.integrations.moe import _grouped_linear as products

    chosen, order = by_expert(index, module.num_experts)
    experts = torch.arange(module.num_experts, device=index.device, dtype=chosen.dtype)
    ends = torch.searchsorted(chosen, experts, right=True, out_int32=True)  # of each expert's pairs
    pairs = in_order(order, index, len(order))
    first = module.gate_up_proj if module.has_gate else module.up_proj
    states = products(pairs.spread(hidden), first, ends, is_transposed=module.is_transposed)
    states = weighted_gate(module, states, weights.flatten().gather(0, order))
    results = products(states, module.down_proj, ends, is_transposed=module.is_transposed)
    return pairs.collect(results).to(hidden.dtype)


def weighted_gate(module: nn.Module, states: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Returns what experts' last products read, weighted, [pairs, f].

    Args:
        states: what the first products make, [pairs, 2 f], or [pairs, f] without a gate.
        weights: [pairs].
    """
    return one_kernel(_weighted_gate)(module, states, weights)


def _weighted_gate(module: Any, states: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    gated = getattr(module, _GATE)(states) if module.has_gate else module.act_fn(states)
    return (gated * weights[:, None]).to(gated.dtype)
