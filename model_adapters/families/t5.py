"""T5, mT5, UMT5: encoder and decoder share a token embedding, and tables of biases have a column per head."""

from megasched.model_adapters.registry import Adapter

ADAPTER = Adapter(
    model_types=("t5", "mt5", "umt5"),
    roles={
        "shared": "embed.tokens",
        "*.embed_tokens": "embed.tokens",
        "*Attention.q": "qkv.q",
        "*Attention.k": "qkv.k",
        "*Attention.v": "qkv.v",
        "*Attention.o": "attn.out",
        "*.relative_attention_bias": "attn.bias",
        # wi, or wi_0 and wi_1 with a gate
        "*.DenseReluDense.wi*": "mlp.up",
        "*.DenseReluDense.wo": "mlp.down",
        "lm_head": "head",
    },
    local_attributes={"*Attention": ("n_heads",)},
)
