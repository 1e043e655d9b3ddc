"""Phi and Phi-3.5-MoE: attention that Megatron's can compute."""

from megasched.model_adapters.registry import Adapter, AttentionFacts

ADAPTER = [
    Adapter(
        model_types=("phi",),
        attention=AttentionFacts({"normalization": "LayerNorm", "out": "self_attn.dense"}),
    ),
    Adapter(model_types=("phimoe",), attention=AttentionFacts(one_window=True)),
]
