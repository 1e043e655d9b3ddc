"""OPT: attention views its heads by a count of its own."""

from megasched.model_adapters.registry import Adapter

ADAPTER = Adapter(
    model_types=("opt",),
    roles={
        "model.decoder.embed_tokens": "embed.tokens",
        "model.decoder.embed_positions": "embed.positions",
        "model.decoder.layers.*.self_attn.q_proj": "qkv.q",
        "model.decoder.layers.*.self_attn.k_proj": "qkv.k",
        "model.decoder.layers.*.self_attn.v_proj": "qkv.v",
        "model.decoder.layers.*.self_attn.out_proj": "attn.out",
        "model.decoder.layers.*.fc1": "mlp.up",
        "model.decoder.layers.*.fc2": "mlp.down",
        "lm_head": "head",
    },
    local_attributes={"model.decoder.layers.*.self_attn": ("num_heads",)},
)
