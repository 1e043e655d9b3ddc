"""Phi-3: q, k, v and gate, up each packed into one projection, which HF's plan gathers inside the layer."""

from typing import Any

from megasched.language.module_specs import MlpSpec
from megasched.model_adapters.registry import Adapter, AttentionFacts, LayerFacts


def qkv_sizes(config: Any) -> tuple[int, int, int]:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    keys = config.num_key_value_heads * head_dim
    return config.num_attention_heads * head_dim, keys, keys


ADAPTER = Adapter(
    model_types=("phi3",),
    roles={
        "model.embed_tokens": "embed.tokens",
        "model.layers.*.self_attn.qkv_proj": "qkv.packed",
        "model.layers.*.self_attn.o_proj": "attn.out",
        "model.layers.*.mlp.gate_up_proj": "mlp.gate_up",
        "model.layers.*.mlp.down_proj": "mlp.down",
        "lm_head": "head",
    },
    packed={
        "qkv.packed": qkv_sizes,
        "mlp.gate_up": lambda config: (config.intermediate_size, config.intermediate_size),
    },
    local_attributes={"model.layers.*.self_attn": ("config.num_attention_heads", "num_key_value_heads")},
    attention=AttentionFacts({"qkv": "self_attn.qkv_proj"}, one_window=True),
    layer=LayerFacts(
        {"mlp": MlpSpec(gate="", up="", gate_up="mlp.gate_up_proj")},
        dropout="resid_pdrop",
    ),
)
