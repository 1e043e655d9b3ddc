"""Registers the compiler ``megatron``, for sub-graphs that one of megatron-core's fused functions computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megasched.graph.compilers import register_compiler
from megasched.graph.partition import ExtractedSubgraph
from megasched.language.subgraph import Subgraph


def _swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Maps gate and up, [..., f] each, to [..., f]; Megatron's function takes both in one tensor."""
    from megatron.core.fusions.fused_bias_swiglu import bias_swiglu_impl

    return bias_swiglu_impl(torch.cat([gate, up], dim=-1), None)


def _bias_gelu(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Maps [..., f] and a bias [f] to [..., f]."""
    from megatron.core.fusions.fused_bias_gelu import bias_gelu_impl

    return bias_gelu_impl(x, bias)


# Pattern as find() names it -> Megatron's function. Its gelu is the tanh form; erf would change the model.
FUSIONS: dict[str, Callable[..., torch.Tensor]] = {"swiglu": _swiglu, "bias_gelu:tanh": _bias_gelu}


def _no_fusion(subgraph: Subgraph) -> str:
    if subgraph.pattern in FUSIONS:
        return ""
    found = f"a sub-graph found as {subgraph.pattern}" if subgraph.pattern else "one that no ready pattern found"
    return f"megatron has fused functions for {', '.join(sorted(FUSIONS))}, not for {found}"


@register_compiler("megatron", _no_fusion)
def megatron(part: ExtractedSubgraph) -> Callable[..., Any]:
    """Returns Megatron's own fused function, which takes the pattern's operands."""
    return FUSIONS[part.subgraph.pattern]
