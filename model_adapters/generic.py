"""Reads HF's own tensor-parallel plan as roles.

transformers keeps a plan per architecture (``model.tp_plan``: path pattern -> style). The table of styles
is complete: a style that is not in it is an error, never ignored. Modules that no plan shards stay whole here;
``megasched.analysis.roles.infer`` looks for more.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import nn

from megasched.definition.build import input_embedding, text_config
from megasched.errors import ConfigError
from megasched.language.roles import Roles

# HF's style -> how the leaf is cut. None: it stays whole; gradients that are partial by it are derived, and so
# is what must be gathered. Aliases of older releases stand with their successors.
# transformers/distributed/tensor_parallel.py and expert_parallel.py
STYLES: dict[str, str | None] = {
    "colwise": "column",
    "packed_colwise": "column",
    "colwise_gather_output": "column",
    "colwise_rep": "column",
    "rowwise": "row",
    "packed_rowwise": "row",
    "rowwise_split_input": "row",
    "rowwise_rep": "row",
    "embedding_rowwise": "vocab",
    "embedding_colwise": None,
    "replicated_with_grad_allreduce": None,
    "replicate": None,
    "local_params": None,
    "mla_kv_a_proj": None,
    "all_reduce": None,
    "sequence_parallel": None,
    # experts: whole on each tensor-parallel rank
    "moe_tp_experts": None,
    "moe_identity_expert": None,
    "ep_dispatch_experts": None,
    "ep_router": None,
    "gather": None,
    "grouped_gemm": None,
}

# Styles that ask for nothing but what is derived.
WHOLE = frozenset(
    ["replicated_with_grad_allreduce", "replicate", "all_reduce", "sequence_parallel", "mla_kv_a_proj"]
)

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
    """Returns the roles of a definition by its HF plan; its embedding and head have theirs even without a plan.

    Raises:
        ConfigError: the plan names an unknown style.
    """
    config: Any = model.config
    plan = {pattern: style for pattern, style in (model.tp_plan or {}).items() if style is not None}
    paths = [path for path, _ in model.named_modules()]
    for pattern, style in plan.items():
        if style not in STYLES and any(_matches(pattern, path) for path in paths):
            raise ConfigError(
                f"{config.model_type}: HF's plan gives {pattern!r} the style {style!r}, which is not known; "
                f'add it to STYLES in model_adapters/generic.py: "{style}": "column" | "row" | None'
            )
    role: dict[str, str] = {}
    origin: dict[str, str] = {}
    declined = _unnamed_ends(model)
    ends_whole = _why_ends_whole(model)
    for path, module in model.named_modules():
        pattern = next((pattern for pattern in plan if _matches(pattern, path)), None)
        cut = STYLES[plan[pattern]] if pattern is not None else None
        name = _role(path, module, cut, model)
        told = f"HF's plan: {pattern} is {plan[pattern]}" if pattern is not None else "end of every model"
        if name in ("embed.tokens", "head") and ends_whole:
            declined[path] = ends_whole
        elif name is not None and isinstance(module, nn.Linear | nn.Embedding):
            role[path], origin[path] = name, told
        elif pattern is not None and plan[pattern] not in WHOLE:
            declined[path] = told
    # HF's own plan gathers what is packed; cut half by half it need not be.
    packed = [path for path, name in role.items() if name == "mlp.gate_up"]
    components = {path: (model.get_submodule(path).weight.shape[0] // 2,) * 2 for path in packed}
    return Roles(role, head_counts(role, config), components, origin=origin, declined=declined)


def _why_ends_whole(model: nn.Module) -> str:
    """Returns why embedding and head can't be sharded; empty if they can.

    They can't if another module shares one of their parameters.
    """
    embedding, head = input_embedding(model), model.get_output_embeddings()
    own = {id(p) for end in (embedding, head) if end is not None for p in end.parameters(recurse=False)}
    others = (module for module in model.modules() if module is not embedding and module is not head)
    if any(id(p) in own for module in others for p in module.parameters(recurse=False)):
        return "shares a parameter with a module that is neither the embedding nor the head"  # bias of BERT's head
    return ""


def _unnamed_ends(model: nn.Module) -> dict[str, str]:
    """Returns what looks like the embedding or the head, by path with a reason, where the class names neither."""
    vocab_size = getattr(text_config(model.config), "vocab_size", None)
    if vocab_size is None or input_embedding(model) is not None:
        return {}
    return {
        path: f"get_input_embeddings of {type(model).__name__} does not find its embedding of tokens, so neither "
        "embedding nor head is cut; let the class define it, or set _input_embed_layer to the name"
        for path, module in model.named_modules()
        if isinstance(module, nn.Embedding | nn.Linear) and module.weight.shape[0] == vocab_size
    }


def _matches(pattern: str, path: str) -> bool:
    return re.fullmatch(pattern.replace(".", r"\.").replace("*", r"[^.]+"), path) is not None


def _role(path: str, module: nn.Module, cut: str | None, model: nn.Module) -> str | None:
    if module is input_embedding(model):
        return "embed.tokens"
    if module is model.get_output_embeddings():
        return "head"
    if cut is None or cut == "vocab":
        return None
    return LEAVES[cut].get(path.rpartition(".")[2], cut)


def head_counts(role: Mapping[str, str], config: Any) -> dict[str, int]:
    """Returns the heads in the output of each projection to q, k or v, and of ``attn.out``, by HF's config."""
    config = text_config(config)
    queries = getattr(config, "num_attention_heads", None)
    keys = getattr(config, "num_key_value_heads", None) or queries
    counts = {"qkv.q": queries, "attn.out": queries, "qkv.k": keys, "qkv.v": keys, "qkv.packed": keys}
    return {path: counts[name] for path, name in role.items() if counts.get(name)}
