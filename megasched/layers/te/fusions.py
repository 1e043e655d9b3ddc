"""Registers the compiler ``te``, for sub-graphs that one of Transformer Engine's fusible operations computes."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch

from megasched.graph.compilers import register_compiler
from megasched.graph.partition import ExtractedSubgraph
from megasched.language.subgraph import Subgraph


def _no_te(subgraph: Subgraph) -> str:
    if importlib.util.find_spec("transformer_engine") is None:
        return "Transformer Engine is not installed: pip install 'megasched[te]', on a machine with CUDA"
    if subgraph.pattern.partition(":")[0] != "swiglu":
        return "te has a kernel for patterns.swiglu alone; use compiler='inductor', or replace the module"
    return ""


@register_compiler("te", _no_te)
def te(part: ExtractedSubgraph) -> Callable[..., Any]:
    """Returns Transformer Engine's fusible operation for the pattern."""
    from transformer_engine.pytorch import ops

    fused = ops.SwiGLU()
    return lambda gate, up: fused(torch.cat([gate, up], dim=-1))
