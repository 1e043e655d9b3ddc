"""Persimmon: q, k, v packed head by head, an MLP without a gate."""

from megasched.language.module_specs import MlpSpec
from megasched.model_adapters.registry import Adapter, AttentionFacts, LayerFacts

ADAPTER = Adapter(
    model_types=("persimmon",),
    attention=AttentionFacts(
        {
            "normalization": "LayerNorm",
            "qkv": "self_attn.query_key_value",
            "by_heads": True,
            "out": "self_attn.dense",
        }
    ),
    layer=LayerFacts({"mlp": MlpSpec(gate="", up="mlp.dense_h_to_4h", down="mlp.dense_4h_to_h")}),
)
