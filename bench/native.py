"""Megatron's own model of the shape that is measured: its ``GPTModel``, or the ``HybridModel`` that follows it.

core 0.20 announces that ``HybridModel`` takes the place of ``GPTModel`` (core/models/gpt/gpt_model.py). A layer of
``GPTModel`` is two of ``HybridModel``: attention ("*"), and its MLP ("-") or its experts ("E")
(core/models/hybrid/hybrid_layer_allocation.py). Both are made of the same submodules here and compute the same.
"""

from __future__ import annotations

import re
from argparse import Namespace
from typing import Any

GPT = "megatron.training.models.gpt.GPTModelBuilder"
HYBRID = "megatron.training.models.hybrid.HybridModelBuilder"
NATIVE = "native"  # whichever of the two the Megatron that runs trains as its own

# HF's names, in Llama and what is like it, and Megatron's.
NAMES = {
    "model.layers": "decoder.layers",
    "model.embed_tokens": "embedding.word_embeddings",
    "model.norm": "decoder.final_layernorm",
    "lm_head": "output_layer",
    "self_attn": "self_attention",
    "o_proj": "linear_proj",
    "q_norm": "q_layernorm",
    "k_norm": "k_layernorm",
    "post_attention_layernorm": "pre_mlp_layernorm",
    "mlp.gate.": "mlp.router.",
    "mlp.down_proj": "mlp.linear_fc2",
}


def model_config(args: Namespace, builder: str) -> Any:
    """What Megatron's trainer is told of the model, by that builder class (import path) or ``NATIVE``."""
    from megatron.core.package_info import MAJOR, MINOR

    from megasched.launch.pretrain_gpt import model_config as described

    if builder == NATIVE:
        builder = HYBRID if (MAJOR, MINOR) >= (0, 20) else GPT
    told = _with_experts(args) if builder in (GPT, HYBRID) else args
    config = _hybrid(told) if builder == HYBRID else described(told)
    type(config).builder = builder
    return config


def _hybrid(args: Namespace) -> Any:
    from megatron.training.argument_utils import hybrid_config_from_args

    told = {"num_layers": 2 * args.num_layers, "hybrid_layer_pattern": _pattern(args), "spec": None}
    config = hybrid_config_from_args(Namespace(**{**vars(args), **told}))
    config.hybrid_stack_spec = _stack_spec(config.transformer)
    return config


def _pattern(args: Namespace) -> str:
    return ("*E" if args.num_experts else "*-") * args.num_layers


def _with_experts(args: Namespace) -> Namespace:
    """What Megatron's own model is told beside of Mixtral's experts, which it is to choose as HF does.

    megasched refuses these flags (HF's router decides), so they are no part of the command line. The softmax is
    over the chosen experts, no token is dropped, and there is no auxiliary loss.
    """
    from megasched.trainer.current_session import get_session

    config = get_session().definition.config
    if config.model_type != "mixtral":
        return args
    told = {
        "num_experts": config.num_local_experts,
        "moe_ffn_hidden_size": config.intermediate_size,
        "moe_router_topk": config.num_experts_per_tok,
        "moe_router_pre_softmax": False,
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "alltoall",
        "moe_grouped_gemm": args.transformer_impl == "transformer_engine",  # its kernel; else one expert at a time
    }
    return Namespace(**{**vars(args), **told})


def _stack_spec(config: Any) -> Any:
    """The layers of a ``HybridModel``, of the submodules of ``GPTModel``'s.

    Megatron's own spec knows neither norms of queries and keys nor layers without Transformer Engine.
    """
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.models.hybrid import hybrid_block
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_layer import (
        MoETransformerLayer,
        TransformerLayer,
        TransformerLayerSubmodules,
    )

    experts = {"num_experts": config.num_moe_experts, "moe_grouped_gemm": config.moe_grouped_gemm}
    if config.transformer_impl == "transformer_engine":
        made = gpt_layer_specs.get_gpt_layer_with_transformer_engine_submodules(
            **experts, qk_layernorm=config.qk_layernorm
        )
    else:
        made = gpt_layer_specs.get_gpt_layer_local_submodules(
            **experts, qk_layernorm=config.qk_layernorm, normalization=config.normalization
        )
        hybrid_block.TENorm = WrappedTorchNorm  # the last norm is Transformer Engine's by name
    attention = TransformerLayerSubmodules(
        input_layernorm=made.input_layernorm, self_attention=made.self_attention, self_attn_bda=made.self_attn_bda
    )
    mlp = TransformerLayerSubmodules(pre_mlp_layernorm=made.pre_mlp_layernorm, mlp=made.mlp, mlp_bda=made.mlp_bda)
    return ModuleSpec(
        module=hybrid_block.HybridStack,
        submodules=hybrid_block.HybridStackSubmodules(
            attention_layer=ModuleSpec(module=TransformerLayer, submodules=attention),
            mlp_layer=ModuleSpec(module=MLPLayer, submodules=mlp),
            moe_layer=ModuleSpec(module=MoETransformerLayer, submodules=mlp),
        ),
    )


def fill(own: Any, definition: Any, rank: int = 0, tp: int = 1) -> None:
    """Gives Megatron's own model HF's weights: of each the part of a TP rank. The vocabulary may be padded.

    Args:
        own: ``GPTModel`` or ``HybridModel``.
        definition: HF's model of the same shape, Llama's or one that is like it.
    """
    import torch

    weights = {name: weight.detach() for name, weight in definition.named_parameters()}  # one of the tied
    config, found = definition.config, {}
    for name in list(weights):
        if name.endswith("q_proj.weight"):  # a group: its queries, its key, its value
            names = [name.replace("q_proj", f"{letter}_proj") for letter in "qkv"]
            groups = [weights.pop(n).unflatten(0, (config.num_key_value_heads, -1)) for n in names]
            weights[name.replace("q_proj", "linear_qkv")] = torch.cat(groups, dim=1).flatten(0, 1)
        if name.endswith("mlp.gate_proj.weight"):
            up = weights.pop(name.replace("gate_proj", "up_proj"))
            weights[name.replace("gate_proj", "linear_fc1")] = torch.cat([weights.pop(name), up])
        if ".experts." in name:
            linear = "linear_fc1" if "gate_up" in name else "linear_fc2"
            for number, weight in enumerate(weights.pop(name)):
                weights[f"{name.rpartition('.')[0]}.local_experts.{number}.{linear}.weight"] = weight
    for name, weight in weights.items():
        for theirs, ours in NAMES.items():
            name = name.replace(theirs, ours)
        found[_of_hybrid(name) if hasattr(own.decoder, "final_norm") else name] = weight
    parameters = dict(own.named_parameters())
    if found.keys() != parameters.keys():
        raise ValueError(f"not in both: {sorted(found.keys() ^ parameters.keys())}")
    with torch.no_grad():
        for name, parameter in parameters.items():
            held = _of_rank(name, found[name], parameter.shape[0], rank, tp)
            parameter[: held.shape[0]] = held


def _of_rank(name: str, weight: Any, rows: int, rank: int, tp: int) -> Any:
    """What a TP rank has of a weight; of a vocabulary it has so many rows, of which the last may be padding."""
    if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
        return weight.chunk(tp, dim=1)[rank]
    if name.endswith("linear_fc1.weight"):
        return weight.unflatten(0, (2, -1)).chunk(tp, dim=1)[rank].flatten(0, 1)
    if name.endswith("linear_qkv.weight"):
        return weight.chunk(tp)[rank]
    if name.endswith(("word_embeddings.weight", "output_layer.weight")):
        return weight[rank * rows : (rank + 1) * rows]
    return weight


def _of_hybrid(name: str) -> str:
    """The name in a HybridModel, whose layers hold either attention or the MLP."""
    found = re.fullmatch(r"decoder\.layers\.(\d+)\.(.*)", name)
    if not found:
        return name.replace("final_layernorm", "final_norm")
    return f"decoder.layers.{2 * int(found[1]) + ('mlp' in found[2])}.{found[2]}"
