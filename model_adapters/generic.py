"""The generic adapter: HF's own tensor-parallel plan, read as roles.

transformers keeps a plan per architecture (``model.tp_plan``: path pattern -> style). The table of styles
is total: a style that is not in it is an error, never ignored.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from megasched.errors import ConfigError
from megasched.model_adapters.registry import head_counts
from megasched.roles import Roles

if TYPE_CHECKING:
    from torch import nn

# HF's style -> how the leaf is cut. None: it stays whole; gradients that are partial by it are derived.
# https://huggingface.co/docs/transformers/perf_infer_gpu_multi; transformers/integrations/tensor_parallel.py
STYLES: dict[str, str | None] = {
    "colwise": "column",
    "rowwise": "row",
    "colwise_gather_output": "column",
    "colwise_rep": "column",
    "rowwise_split_input": "row",
    "rowwise_rep": "row",
    "embedding_rowwise": "vocab",
    "replicated_with_grad_allreduce": None,
    "replicate": None,
    "sequence_parallel": None,
}

# Leaf name -> role, where the plan cuts the leaf this way.
LEAVES: dict[str, dict[str, str]] = {
    "column": {
        "q_proj": "qkv.q",
        "k_proj": "qkv.k",
        "v_proj": "qkv.v",
        "gate_proj": "mlp.gate",
        "up_proj": "mlp.up",
        "gate_up_proj": "mlp.gate_up",
    },
    "row": {"o_proj": "attn.out", "down_proj": "mlp.down"},
}


def read_plan(model: nn.Module) -> Roles:
    """Roles of a definition that carries an HF plan.

    Raises:
        ConfigError: it has none beyond its head, or the plan names a style that is not known.
    """
    config: Any = model.config
    plan = {pattern: style for pattern, style in (model.tp_plan or {}).items() if style is not None}
    layered = [pattern for pattern in plan if "layers" in pattern]
    if not layered:
        raise ConfigError(
            f"no adapter for model type {config.model_type!r}, and transformers has no tensor-parallel plan for "
            "it either; register an Adapter (see docs/adapters.md), or run it with PP and DP under a schedule "
            "of your own that shards nothing"
        )
    role: dict[str, str] = {}
    for path, _ in model.named_modules():
        for pattern, style in plan.items():
            if not re.fullmatch(pattern.replace(".", r"\.").replace("*", r"[^.]+"), path):
                continue
            if style not in STYLES:
                raise ConfigError(
                    f"{config.model_type}: HF's plan gives {pattern!r} the style {style!r}, which is not known; "
                    f'add it to STYLES in model_adapters/generic.py: "{style}": "column" | "row" | None'
                )
            name = _role(path, STYLES[style], model)
            if name is not None:
                role[path] = name
    # HF's own plan gathers what is packed; cut half by half it need not be.
    packed = [path for path, name in role.items() if name == "mlp.gate_up"]
    components = {path: (model.get_submodule(path).weight.shape[0] // 2,) * 2 for path in packed}
    return Roles(role, head_counts(role, config), components)


def _role(path: str, cut: str | None, model: nn.Module) -> str | None:
    if cut is None:
        return None
    if cut == "vocab":
        return "embed.tokens"
    if model.get_submodule(path) is model.get_output_embeddings():
        return "head"
    return LEAVES[cut].get(path.rpartition(".")[2], cut)
