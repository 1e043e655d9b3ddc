"""GPT-NeoX: q, k, v packed head by head ([heads, 3, head_dim]), so that whole heads are sharded in place."""

from megasched.model_adapters.registry import Adapter, AttentionFacts

ADAPTER = Adapter(
    model_types=("gpt_neox",),
    roles={
        "gpt_neox.embed_in": "embed.tokens",
        "gpt_neox.layers.*.attention.query_key_value": "qkv.packed",
        "gpt_neox.layers.*.attention.dense": "attn.out",
        "gpt_neox.layers.*.mlp.dense_h_to_4h": "mlp.up",
        "gpt_neox.layers.*.mlp.dense_4h_to_h": "mlp.down",
        "lm_head": "head",
    },
    attention=AttentionFacts(
        {
            "normalization": "LayerNorm",
            "qkv": "attention.query_key_value",
            "by_heads": True,
            "out": "attention.dense",
            "rotary": "gpt_neox.rotary_emb",
        }
    ),
)
